"""A trainer reads on where its cursor is, also when what it had not read yet was consumed by a replayed plan and trimmed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from actor_fixture import eventually, make_context

from physarum.actors.trainer.cursor import Cursor
from physarum.actors.trainer.groups import Arrived
from physarum.actors.trainer.intake import Intake
from physarum.actors.wire import publish_execution
from physarum.bus import names
from physarum.bus.connection import Bus
from physarum.bus.intervals import IntervalSet
from physarum.bus.log import LogGapError
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Task

pytestmark = pytest.mark.timeout(30)


class Admitting:
    """Stands where the planner does."""

    def __init__(self) -> None:
        self.sequences: list[int] = []

    def admit(self, arrived: Arrived, now: float) -> None:
        self.sequences.append(arrived.sequence)


async def stored(context: Any, bus: Bus, count: int) -> None:
    for ordinal in range(count):
        task = Task(
            id=f"s/0/{ordinal}/0",
            run=bus.run,
            source="s",
            ordinal=ordinal,
            group=f"s/0/{ordinal}",
            group_size=1,
            member=0,
        )
        sample = Sample(
            token_ids=np.arange(3), prompt_len=2, loss_mask=np.ones(1, np.bool_), logprobs=np.zeros(1, np.float32),
            origin="demonstration",
        )  # fmt: skip
        made = Execution(id=f"x{ordinal}", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=1.0)
        await publish_execution(context, "samples", made)


async def trimmed_below(bus: Bus, sequence: int) -> None:
    await bus.api(f"STREAM.PURGE.{names.stream(bus.run, 'samples')}", {"seq": sequence})


async def test_what_a_replayed_plan_consumed_unread_may_be_gone(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is trained, and its checkpoint lets its samples go, between the reader's beginning and its first message."""
    context, cursor, planner = make_context(tmp_path, bus, publisher, "trainer"), Cursor("log"), Admitting()
    await stored(context, bus, 8)
    cursor.consumed.add(1)
    intake = Intake(context, cast(Any, planner), cursor, IntervalSet())
    read_on, starts = Intake._read_on, list[int]()

    async def overtaken(reading: Intake, start: int) -> None:
        starts.append(start)
        for sequence in range(2, 6):
            cursor.consumed.add(sequence)
        await trimmed_below(bus, 5)
        await read_on(reading, start)

    monkeypatch.setattr(Intake, "_read_on", overtaken)
    reading = asyncio.create_task(intake.read_samples())
    await eventually(lambda: intake.samples_through == 8)
    reading.cancel()
    assert (starts, planner.sequences) == ([2, 6], [6, 7, 8])


async def test_a_gap_above_the_cursor_is_an_error(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context, cursor, planner = make_context(tmp_path, bus, publisher, "trainer"), Cursor("log"), Admitting()
    await stored(context, bus, 4)
    cursor.consumed.add(1)
    intake = Intake(context, cast(Any, planner), cursor, IntervalSet())
    await trimmed_below(bus, 4)
    with pytest.raises(LogGapError, match="expected sequence 2, found 4"):
        await intake.read_samples()
