"""Admission, abortion in flight and drops by age on a real server: what is issued, what is cut off, what closes."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import make_context, register_until, running
from aiohttp import web
from aiohttp.test_utils import TestServer
from bus_fixture import DEADLINE_S
from fault_line import HOOKS, context, line, prepare

from physarum.actors import states
from physarum.actors.rollout.actor import RolloutActor
from physarum.actors.source.actor import SourceActor
from physarum.actors.states import SourcePosition
from physarum.actors.wire import publish_task, read_header
from physarum.bus import ledger, log
from physarum.bus.connection import Bus
from physarum.bus.ledger import Ledger, Planned, PlanRecord, RefillRecord, RollbackRecord, StepRecord
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task
from physarum.bus.register import Register

pytestmark = pytest.mark.timeout(60)


async def issued(bus: Bus, publisher: Publisher, count: int) -> None:
    register: Register[Any] = Register(bus, publisher, "run", SourcePosition)
    await register_until(register, lambda value: value.issued == count, states.SOURCE_POSITION, "main")


async def train(book: Ledger, number: int, *ordinals: int) -> None:
    """A step that disposed of these tasks and left the weights at `number`."""
    executions = [
        Planned(
            sequence=ordinal + 1, task=f"main/{ordinal}", source="main", ordinal=ordinal, attempt=0, group="g",
            advantage=0.0, trained_tokens=1, masked_tokens=0, masks=[],
        )
        for ordinal in ordinals
    ]  # fmt: skip
    plan = await book.append(PlanRecord(epoch=1, at_number=number - 1, executions=executions))
    await book.append(
        StepRecord(
            epoch=1, number=number, plan=plan, changed=True, trained=4, masked=0, tokens_trained=4, tokens_masked=0,
            ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=1.0,
        )
    )  # fmt: skip


class FakeEngine:
    """An engine of the policy that says again and again what it serves."""

    def __init__(self, bus: Bus, publisher: Publisher, url: str = "http://127.0.0.1:1") -> None:
        self._bus, self._publisher, self._url = bus, publisher, url
        self._sequence = itertools.count(1)
        self.version = "policy@1.0"

    async def serve(self, version: str) -> None:
        self.version = version
        beat = Heartbeat(
            role="engine", instance="policy-0", state="ready", pid=1, host="h", sequence=next(self._sequence),
            started_at=1.0, facts={"url": self._url, "version": version, "group": "policy"},
        )  # fmt: skip
        await announce(self._bus, self._publisher, beat)

    async def _beat(self) -> None:
        while True:
            await self.serve(self.version)
            await asyncio.sleep(0.2)

    async def __aenter__(self) -> FakeEngine:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()


async def test_pace_holds_for_the_oldest_task_and_for_the_slowest_engine(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """K = 1, batches of 4 tasks: 8 are let out. A step without task 0 lets out nothing; one with it lets out what the
    engines' weights allow."""
    made = SourceActor(make_context(tmp_path, bus, publisher, "source", "age.admission=pace"))
    async with FakeEngine(bus, publisher) as engine, running(made):
        await issued(bus, publisher, 8)
        book = Ledger(bus, publisher, 0, 1)
        await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
        await train(book, 1, 4, 5, 6, 7)
        await engine.serve("policy@1.1")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await issued(bus, publisher, 10)
        await train(book, 2, 0, 1, 2, 3)
        await issued(bus, publisher, 12)  # weights 1 are served: 4 tasks had been trained then, 8 may be beyond them
        await engine.serve("policy@1.2")
        await train(book, 3, 8, 9, 10, 11)
        await issued(bus, publisher, 16)  # by weights 2, with 8 trained before them; step 4 must take these


async def test_a_hopeless_episode_is_cut_off_and_told_to_the_trainer(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """K = 1: begun under head 0, still running under head 1, cut off at head 2; its slot is free for the next task."""
    asked: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append((await request.json())["rid"])
        await asyncio.Event().wait()
        return web.Response()

    application = web.Application()
    application.router.add_post("/generate", generate)
    options = ["age.consumption=drop", "age.in_flight=abort", "rollout.slots=1", f"rollout.generate={HOOKS}:ask"]
    options.append("supervisor.drain_timeout_s=0.2")  # the second episode never ends by itself
    made = RolloutActor(context(prepare(tmp_path, bus.run, *options), bus, publisher, "rollout"))
    heads: Register[states.Head] = Register(bus, publisher, "weights", states.Head)

    async def publish(number: int) -> None:
        head = states.Head(
            label=f"policy@1.{number}", epoch=1, number=number, manifest="", total_bytes=0, published_at=0.0
        )
        await heads.put(head, states.HEAD, "policy")

    async with TestServer(application) as server, FakeEngine(bus, publisher, str(server.make_url(""))), running(made):
        await publish(0)
        for ordinal in range(2):
            task = Task(
                id=f"main/0/{ordinal}/0", run=bus.run, source="main", ordinal=ordinal, group=f"main/0/{ordinal}",
                group_size=1, member=0, prompt="x", sampling={"max_new_tokens": 8},
            )  # fmt: skip
            await publish_task(made.context, task)
        await _until(lambda: len(asked) == 1)
        await publish(1)
        with pytest.raises(TimeoutError):  # at the bound it goes on
            await _until(lambda: len(asked) == 2, 0.5)
        await publish(2)
        await _until(lambda: len(asked) == 2)
        entries = await log.scan(bus, "samples")
        assert (await log.state(bus, "episodes")).messages == 0
    header = read_header(entries[0].headers)
    assert (header.ordinal, header.samples[0].status, header.trainable) == (0, "aborted", 0)


async def test_what_is_dropped_by_age_is_asked_for_again_and_the_account_closes(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Every first attempt claims the oldest weights; from number 2 on it is over the bound, and its second is trained."""
    options = ["age.consumption=drop", "age.bound=1", f"rollout.generate={HOOKS}:aged", "groups.refills=1"]
    async with line(tmp_path, bus, publisher, *options) as run:
        await run.done()
        made = await run.account()
        records = [item.record for item in await ledger.read(bus)]
    refills = [record for record in records if isinstance(record, RefillRecord)]
    plans = [record for record in records if isinstance(record, PlanRecord)]
    assert made.closes and made.imbalance == 0
    assert made.dropped_by_reason == {"over_age": len(refills)} and refills
    assert {record.reason for record in refills} == {"over_age"}
    assert (made.trained, made.issued) == (40, 40 + len(refills))
    trained = Counter(one.ordinal for plan in plans for one in plan.executions)
    assert trained == Counter(range(40)), "every member of every group, once, by one attempt or the other"
    ages = [age for record in records if isinstance(record, StepRecord) for age in record.ages]
    assert max(ages) <= 1


async def test_waiting_trains_in_the_order_of_admission(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """The second member of row 0 is slow: no other group is trained before its own."""
    options = ["age.consumption=wait", "source.args.habits.0=second-waits", f"rollout.args.folder={tmp_path}"]
    async with line(tmp_path, bus, publisher, *options) as run:
        async with asyncio.timeout(DEADLINE_S):
            while (await log.state(bus, "samples")).messages < 7:
                await asyncio.sleep(0.02)
        assert not [item for item in await ledger.read(bus) if isinstance(item.record, PlanRecord)]
        (tmp_path / "go").touch()
        await run.done()
        made = await run.account()
        plans = [item.record for item in await ledger.read(bus) if isinstance(item.record, PlanRecord)]
    assert made.closes
    assert [one.ordinal for plan in plans for one in plan.executions] == list(range(40))


async def _until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)
