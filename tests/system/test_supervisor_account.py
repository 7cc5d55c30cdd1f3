"""The account as read from a real bus: every stream, evaluation left out, trimming while it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from physarum.actors import states
from physarum.actors.account import account
from physarum.actors.context import Context, Identity, RunFolder
from physarum.actors.wire import publish_execution, publish_task
from physarum.bus import layout, names
from physarum.bus.codec import encode
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.ledger import Ledger, Planned, PlanRecord, RollbackRecord, StepRecord
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.register import Register
from physarum.bus.server import EmbeddedServer
from physarum.bus.version import Span
from physarum.bus.work import DeadLetter
from physarum.configs.root import RootConfig

CONFIG = RootConfig.model_validate(
    {
        "run": {"name": "acc"},
        "model": {"path": "m"},
        "source": {"hook": "a:b"},
        "stop": {"steps": 1},
        "trainer": {"objective": "sft", "lr": 1e-3},
    },
    strict=False,
)


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[Context]:
    server = EmbeddedServer(tmp_path / "bus")
    endpoint = Endpoint.of(CONFIG.bus, (await server.ensure()).url)
    bus = await Bus.connect(endpoint, "acc", "test")
    await layout.create(bus, CONFIG.bus)
    publisher = await Publisher(bus).start()
    yield Context(Identity("acc", "test", "test-0"), CONFIG, RunFolder(tmp_path), endpoint, bus, publisher)
    await bus.close()
    await server.stop()


def task(ordinal: int, task_class: str = "p1") -> Task:
    name = f"main/0/{ordinal}/0" if task_class == "p1" else f"eval/{ordinal}"
    return Task(
        id=name, run="acc", source="main", ordinal=ordinal, group="g", group_size=1, member=0, task_class=task_class
    )  # type: ignore[arg-type]


def execution(ordinal: int, task_class: str = "p1", copy: int = 0) -> Execution:
    sample = Sample(
        token_ids=np.arange(3, dtype=np.int32),
        prompt_len=1,
        loss_mask=np.array([True, True]),
        logprobs=np.zeros(2, np.float32),
        spans=[Span("policy@1.0", 0, 2)],
    )
    return Execution(
        id=f"{task_class}{ordinal}.{copy}", task=task(ordinal, task_class), samples=[sample], worker="w", started_at=0.0,
        finished_at=1.0,
    )  # fmt: skip


async def train(context: Context, ordinals: list[int]) -> None:
    pen = Ledger(context.bus, context.publisher, 0, 1)
    await pen.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
    rows = [Planned(0, task(n).id, "main", n, 0, "g", 0.0, 2, 0, []) for n in ordinals]
    plan = await pen.append(PlanRecord(epoch=1, at_number=1, executions=rows))
    await pen.append(
        StepRecord(
            epoch=1, number=1, plan=plan, changed=True, trained=len(rows), masked=0, tokens_trained=2 * len(rows),
            tokens_masked=0, ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=1.0,
        )
    )  # fmt: skip


async def bury(context: Context, subject: str, body: bytes, headers: dict[str, str], number: int) -> None:
    letter = DeadLetter(
        stream="s", subject=subject, sequence=number, key="", reason="r", deliveries=5, worker="w", at=0.0, headers=headers,
        body=body,
    )  # fmt: skip
    await context.publisher.publish(names.subject("acc", "dead", "s", str(number)), encode(letter))


async def test_each_stream_is_counted_once_and_evaluation_never(context: Context) -> None:
    position = states.SourcePosition(epoch=0, index=0, issued=6, token=1)
    await Register(context.bus, context.publisher, "run", states.SourcePosition).put(
        position, states.SOURCE_POSITION, "main"
    )
    await train(context, [0, 1])
    for ordinal in (0, 1, 2):
        await publish_execution(context, "samples", execution(ordinal))  # 0 and 1 are trained, 2 waits
    await publish_execution(context, "episodes", execution(3))
    await publish_execution(context, "episodes", execution(3, copy=1))  # its task was redelivered
    await publish_task(context, task(4))
    await publish_task(context, task(6))  # published, not committed by the source yet
    await bury(context, "ph.acc.tasks.p1.x", encode(task(5)), {}, 1)
    for key in ("episodes", "samples"):
        await publish_execution(context, key, execution(9, "eval"))
    await publish_task(context, task(9, "eval"))
    await bury(context, "ph.acc.tasks.eval.x", encode(task(9, "eval")), {}, 2)
    found = await account(context.bus)
    assert (found.issued, found.trained, found.in_flight, found.dead, found.ahead) == (6, 2, 3, 1, 1)
    assert (found.imbalance, found.double_trained, found.tokens.trained) == (0, 0, 4)


async def test_samples_that_a_checkpoint_let_go_are_still_accounted(context: Context) -> None:
    position = states.SourcePosition(epoch=0, index=0, issued=3, token=1)
    await Register(context.bus, context.publisher, "run", states.SourcePosition).put(
        position, states.SOURCE_POSITION, "main"
    )
    for ordinal in (0, 1, 2):
        await publish_execution(context, "samples", execution(ordinal))
    await train(context, [0, 1])
    await context.bus.api(f"STREAM.PURGE.{names.stream('acc', 'samples')}", {"seq": 3})
    found = await account(context.bus)
    assert (found.trained, found.in_flight, found.imbalance) == (2, 1, 0)


async def test_a_run_that_has_not_begun_has_an_empty_account_that_closes(context: Context) -> None:
    found = await account(context.bus)
    assert (found.issued, found.in_flight, found.closes) == (0, 0, True)
