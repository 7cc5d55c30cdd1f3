"""The trainer's side of a mirror: one copy at a time, the newest wins, failures are counted, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from actor_fixture import BASE

from physarum.actors.mirror.errors import MirrorError
from physarum.actors.mirror.records import Copied, Copy, Retain, Retained
from physarum.actors.trainer import mirroring as module
from physarum.actors.trainer.checkpoints import CheckpointMeta, Checkpoints
from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.mirroring import Mirroring
from physarum.actors.trainer.recovery import recover
from physarum.bus.ledger import DurableRecord, Numbered, WithdrawRecord
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

URL = "s3://bucket/runs/test"


class Asked:
    """Stands for the processes that speak to the store: what they were asked, and answers when the test says so."""

    def __init__(self) -> None:
        self.requests: list[Copy | Retain] = []
        self.answers: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.came = asyncio.Semaphore(0)

    async def __call__(self, request: Copy | Retain, expected: type, silence_s: float) -> Copied | Retained:
        self.requests.append(request)
        if isinstance(request, Copy):
            assert (Path(request.folder) / "digests.msgpack").is_file()
            self.came.release()
            if (error := await self.answers.get()) is not None:
                raise error
            return Copied(100)
        return Retained([])

    @property
    def copied(self) -> list[str]:
        return [one.checkpoint.name for one in self.requests if isinstance(one, Copy)]

    @property
    def retained(self) -> list[Retain]:
        return [one for one in self.requests if isinstance(one, Retain)]


class Trainer:
    """What Mirroring sees of the trainer."""

    def __init__(self, folder: Path, *settings: str) -> None:
        recipe = folder / "recipe.yaml"
        recipe.write_text(BASE)
        self.config = resolve(recipe, parse_command_line([*settings]))
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.numbers: dict[str, float] = {}
        self.events: list[dict[str, Any]] = []
        self.context = SimpleNamespace(draining=asyncio.Event(), emit=self._emit)

    async def _emit(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append({"kind": kind, **values})

    def durable(self, number: int) -> DurableRecord:
        aside = self.checkpoints.aside(1)
        meta = CheckpointMeta(epoch=1, number=number, steps=number, trained_s=1.0, cursor=Cursor("c").record())
        digest, folder = self.checkpoints.commit(aside, meta)
        return DurableRecord(epoch=1, number=number, digest=digest, folder=folder.name, floor=1, last_plan=number)

    def mirroring(self, *records: DurableRecord | WithdrawRecord) -> Mirroring:
        ledger = [Numbered(sequence, one) for sequence, one in enumerate(records, start=1)]
        return Mirroring(cast(Any, self), recover(ledger))


Start = Callable[[Mirroring], Awaitable[None]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    made = Asked()
    monkeypatch.setattr(module, "ask", made)
    return made


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path, "checkpoint.mirror=s3://bucket/runs", "supervisor.drain_timeout_s=0.02")


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    tasks: list[asyncio.Task[None]] = []

    async def begin(mirroring: Mirroring) -> None:
        tasks.append(asyncio.create_task(mirroring.run()))
        await asyncio.sleep(0)

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.timeout(20)
async def test_the_newest_wins_and_what_is_let_go_meanwhile_is_copied_to_its_end(
    trainer: Trainer, asked: Asked, start: Start
) -> None:
    mirroring = trainer.mirroring()
    await start(mirroring)
    mirroring.offer(trainer.durable(1))
    await asked.came.acquire()
    for number in (2, 3):
        mirroring.offer(trainer.durable(number))
    trainer.checkpoints.retain(["1.3"])
    assert (Path(cast(Copy, asked.requests[0]).folder) / "digests.msgpack").is_file()
    asked.answers.put_nowait(None)
    asked.answers.put_nowait(None)
    await mirroring.settled()
    assert asked.copied == ["1.1", "1.3"]
    assert trainer.numbers == {"mirrored": 3}
    assert [one["checkpoint"] for one in trainer.events] == ["1.1", "1.3"]
    assert (asked.retained[-1].keep, [one.name for one in asked.retained[-1].known]) == (3, ["1.1", "1.2", "1.3"])
    assert [path.name for path in trainer.checkpoints.folder.iterdir()] == ["1.3"]  # no second names are left


@pytest.mark.timeout(20)
async def test_a_failure_is_counted_and_named_and_the_next_checkpoint_is_the_next_try(
    trainer: Trainer, asked: Asked, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    mirroring = trainer.mirroring()
    await start(mirroring)
    asked.answers.put_nowait(MirrorError("the store was silent for 300 s"))
    mirroring.offer(trainer.durable(1))
    await mirroring.settled()
    assert trainer.numbers == {"mirror_failures": 1}
    assert f"checkpoint 1.1 is not in {URL} (failure 1)" in caplog.text and "silent for 300 s" in caplog.text
    assert asked.retained == []
    asked.answers.put_nowait(None)
    mirroring.offer(trainer.durable(2))
    await mirroring.settled()
    assert trainer.numbers == {"mirror_failures": 1, "mirrored": 2}


@pytest.mark.timeout(20)
async def test_a_checkpoint_that_is_gone_before_its_copy_is_a_failure_only_where_none_follows(
    trainer: Trainer, asked: Asked, start: Start
) -> None:
    mirroring = trainer.mirroring()
    mirroring.offer(trainer.durable(1))
    shutil.rmtree(trainer.checkpoints.folder / "1.1")
    await start(mirroring)
    await mirroring.settled()
    assert (asked.requests, trainer.numbers) == ([], {"mirror_failures": 1})


@pytest.mark.timeout(20)
async def test_a_new_trainer_copies_what_it_began_from_and_knows_what_was_withdrawn(
    trainer: Trainer, asked: Asked, start: Start
) -> None:
    good, bad = trainer.durable(1), trainer.durable(2)
    mirroring = trainer.mirroring(good, bad, WithdrawRecord(epoch=1, number=1, last_plan=1, reason="bad"))
    asked.answers.put_nowait(None)
    await start(mirroring)
    await asked.came.acquire()
    await mirroring.settled()
    assert asked.copied == ["1.1"]
    [retained] = asked.retained
    assert ([one.name for one in retained.candidates], [one.name for one in retained.known]) == (
        ["1.1"],
        ["1.1", "1.2"],
    )


@pytest.mark.timeout(20)
async def test_a_run_that_drains_waits_only_as_long_as_it_may(
    trainer: Trainer, asked: Asked, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    mirroring = trainer.mirroring()
    await start(mirroring)
    mirroring.offer(trainer.durable(1))
    await asked.came.acquire()
    trainer.context.draining.set()
    await mirroring.settled()  # the store never answers
    assert "the next start copies it" in caplog.text


@pytest.mark.timeout(20)
async def test_without_a_mirror_nothing_is_asked(
    tmp_path: Path, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trainer = Trainer(tmp_path)
    durable = trainer.durable(1)
    mirroring = trainer.mirroring(durable)
    mirroring.offer(durable)
    await mirroring.run()
    await mirroring.settled()
    assert (asked.requests, trainer.numbers, caplog.text) == ([], {}, "")
