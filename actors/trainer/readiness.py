"""What the trainer does next: a batch or a plan of drops is ready, nothing more will come, or it drains; meanwhile, requests.

Nothing polls: samples, deaths, the source's end, requests and resumption set events; deadlines of groups and of drops, and
the end of an exhausted source, bound the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, NamedTuple

from physarum.actors.context import Context
from physarum.actors.trainer.exhaustion import Exhaustion
from physarum.actors.trainer.intake import Intake
from physarum.actors.trainer.leader import Leader
from physarum.actors.trainer.log_space import LogSpace
from physarum.actors.trainer.planner import Planner
from physarum.actors.trainer.stepping import Stepper
from physarum.bus.ledger import GroupClosedRecord, RefillRecord

Request = Callable[[], Awaitable[None]]
"""Something to be done between steps; it answers its caller by itself."""


class Next(NamedTuple):
    """`waited_s`: seconds without a full batch; `why`: of what ends training."""

    what: Literal["batch", "drops", "exhausted", "let go", "draining"]
    waited_s: float
    why: str = ""


class Readiness:
    """One trainer's waiting. `report` is told how many groups wait; `refills` counts the replacements asked for so far."""

    def __init__(
        self,
        context: Context,
        stepper: Stepper,
        planner: Planner,
        intake: Intake,
        refills: int,
        report: Callable[[int], None],
    ) -> None:
        self._context, self._stepper, self._planner, self._intake = context, stepper, planner, intake
        self._refills = refills
        self._report = report
        self._requests: list[Request] = []
        self.exhaustion = Exhaustion(context, intake)
        self.leader = Leader(context, intake.changed.set)
        self.space = LogSpace(context, stepper, planner, intake)

    def ask(self, request: Request) -> None:
        """Has `request` done between two steps."""
        self._requests.append(request)
        self._intake.changed.set()

    async def next(self) -> Next:
        """Waits for the next thing to do."""
        started = time.perf_counter()
        while True:
            self._intake.changed.clear()
            if self._context.draining.is_set():
                return Next("draining", 0.0)
            await self._serve()
            if not self._context.paused:
                await self._decided()
                if self._planner.ready:
                    return Next("batch", time.perf_counter() - started)
                if self._planner.drops_are_due or _passed(self._planner.drops_due_at):
                    return Next("drops", 0.0)
                if self.leader.done is not None and not self.exhaustion.source_ended:
                    return Next("let go", 0.0, self.leader.done.reason)
                if self.leader.permits_exhaustion and await self.exhaustion.reached(self._refills):
                    if await self._decided():
                        continue
                    await self._record(self._planner.groups.rest())
                    return Next("exhausted", time.perf_counter() - started)
                if await self.space.wanted():
                    closings = await self.space.make()
                    if closings is None and not await self._decided():
                        return Next("batch", time.perf_counter() - started)
                    await self._record(closings or [])
                    continue
            self._report(self._planner.groups.complete)
            await self._change()

    async def _serve(self) -> None:
        requests, self._requests = self._requests, []
        for request in requests:
            await request()

    async def _decided(self) -> bool:
        """Records and applies all that deaths, ages and deadlines ask for now; whether there was anything.

        Until nothing is left: what came while one was recorded may be over age, too, and a plan that took it would drop it
        without asking for it again. So nothing is awaited after the last look.
        """
        recorded = False
        while True:
            now = time.monotonic()
            self._intake.refills += self._planner.settle(self._stepper.number, self._stepper.forks, now)
            closings = self._planner.groups.overdue(now)
            if not (self._intake.refills or closings):
                return recorded
            await self._record(closings)
            recorded = True

    async def _record(self, closings: list[GroupClosedRecord]) -> None:
        """Records, then applies, `closings` and the refills that wait."""
        asked, self._intake.refills = self._intake.refills, []
        decisions: list[GroupClosedRecord | RefillRecord] = [*asked, *closings]
        for record in decisions:
            await self._stepper.note(record)
            self._planner.apply(record, time.monotonic())
        self._refills += len(asked)

    async def _change(self) -> None:
        """Until something happened that `next` must look at."""
        deadlines = (self._planner.groups.next_deadline(), self._planner.drops_due_at)
        limits = [max(0.0, deadline - time.monotonic()) for deadline in deadlines if deadline is not None]
        look_s = self.exhaustion.look_again_s if self.leader.permits_exhaustion else None
        limits += [] if look_s is None else [look_s]
        events = [self._context.draining, self._intake.changed]
        events += [self._context.resumed] if self._context.paused else []
        async with _waiting(events) as waits:
            timeout_s = min(limits, default=None) if not self._context.paused else None
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


@contextlib.asynccontextmanager
async def _waiting(events: list[asyncio.Event]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        yield waits
    finally:
        for wait in waits:
            wait.cancel()
