"""What comes while a decision is being recorded is looked at, too, before a batch is taken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from physarum.actors.trainer.groups import Arrived, GroupRules
from physarum.actors.trainer.planner import Planner, PlanRules
from physarum.actors.trainer.readiness import Readiness
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Span

NUMBER = 5
RULES = PlanRules(
    groups_per_batch=1, bound=1, normalize_std=False, objective="rl", max_sequence_tokens=100, consumption="drop",
    groups=GroupRules(refills=1),
)  # fmt: skip


def arrived(ordinal: int, made_by: int) -> Arrived:
    """Of a group of its own."""
    sample = SampleHeader(
        tokens=2, response=1, trainable=1, reward=0.0, status="completed", spans=[Span(f"policy@1.{made_by}", 0, 1)],
        span_trainable=[1],
    )  # fmt: skip
    header = ExecutionHeader(
        execution=f"x{ordinal}", task=f"s/0/{ordinal}/0", source="s", ordinal=ordinal, group=f"s/0/{ordinal}",
        group_size=1, member=0, attempt=0, tenant="", digest="", samples=[sample],
    )  # fmt: skip
    return Arrived(ordinal + 1, header)


class Pen:
    """Stands where the stepper does. While a record is written, the next of `coming` is taken in."""

    number, forks = NUMBER, ()

    def __init__(self, planner: Planner, intake: Any, coming: list[Arrived]) -> None:
        self._planner, self._intake, self._coming = planner, intake, coming
        self.asked: list[int] = []

    async def note(self, record: Any) -> None:
        self.asked.append(record.ordinal)
        if self._coming:
            self._planner.admit(self._coming.pop(0))
            self._intake.changed.set()


def made(coming: list[Arrived]) -> tuple[Readiness, Planner, Pen]:
    """A planner that holds one execution over the bound; its refill is the first record."""
    planner = Planner(RULES)
    planner.admit(arrived(0, made_by=0))
    intake = SimpleNamespace(changed=asyncio.Event(), refills=[])
    context = SimpleNamespace(draining=asyncio.Event(), paused=False, policy="")
    pen = Pen(planner, intake, coming)
    readiness = Readiness(cast(Any, context), cast(Any, pen), planner, cast(Any, intake), 0, lambda groups: None)
    return readiness, planner, pen


async def test_what_comes_over_age_while_a_refill_is_recorded_is_asked_for_again_itself() -> None:
    readiness, planner, pen = made([arrived(1, made_by=0), arrived(2, made_by=NUMBER)])
    async with asyncio.timeout(10.0):
        assert (await readiness.next()).what == "batch"
    record = planner.take(1, NUMBER, ()).record
    assert pen.asked == [0, 1]
    assert [one.ordinal for one in record.executions] == [2]
    assert [(one.ordinal, one.reason) for one in record.dropped] == [(0, "over_age"), (1, "over_age")]


async def test_what_comes_over_age_as_the_last_of_the_data_is_asked_for_again() -> None:
    """It is taken in while the streams are looked at for the last time."""
    readiness, planner, pen = made([])
    await_end = iter([True, False])

    async def reached(refills: int) -> bool:
        if next(await_end):
            planner.admit(arrived(1, made_by=0))
            return True
        planner.admit(arrived(2, made_by=NUMBER))
        readiness._intake.changed.set()
        return False

    cast(Any, readiness.exhaustion).reached = reached
    async with asyncio.timeout(10.0):
        assert (await readiness.next()).what == "batch"
    assert pen.asked == [0, 1]
