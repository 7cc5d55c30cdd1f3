"""Room in the sample log while publishers wait for it and no batch can be taken: the trainer alone can make some.

The log is trimmed below the floor of the kept checkpoints. So it stays full for ever when a checkpoint is due only after
more steps than it holds samples for, or when one slow member keeps the floor where its siblings are. Against that, one
step at a time, and only while the log is full and read to its end without a batch:

    a checkpoint now -> older checkpoints given up -> a smaller batch -> the oldest open group goes on without its missing
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from nats.aio.msg import Msg

from physarum.actors.context import Context
from physarum.actors.errors import UnrecoverableError
from physarum.actors.trainer.intake import Intake
from physarum.actors.trainer.planner import Planner
from physarum.bus import log, names
from physarum.bus.ledger import GroupClosedRecord

if TYPE_CHECKING:
    from physarum.actors.trainer.stepping import Stepper

_log = logging.getLogger(__name__)

_HEADERS_BYTES: Final = 64 << 10
"""NATS's limit for the headers of a message."""


class LogSpace:
    """`intake.changed` is set when a publisher says that it waits."""

    def __init__(self, context: Context, stepper: Stepper, planner: Planner, intake: Intake) -> None:
        self._context, self._stepper, self._planner, self._intake = context, stepper, planner, intake
        self._asked = False

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Publishers are heard within the block."""
        bus = self._context.bus
        subscription = await bus.subscribe(names.full_subject(bus.run, "samples"), self._on_full)
        try:
            yield
        finally:
            if not bus.client.is_closed:
                await subscription.unsubscribe()

    async def _on_full(self, message: Msg) -> None:
        self._asked = True
        self._intake.changed.set()

    async def wanted(self) -> bool:
        """Whether the log is full now, everything in it was taken in, and no other policy keeps it from being trimmed. Ask only
        while no batch is ready."""
        if not self._asked:
            return False
        state = await log.state(self._context.bus, "samples")
        largest = self._context.config.bus.inline_limit_bytes + _HEADERS_BYTES
        self._asked = 0 <= state.limit_bytes < state.bytes + largest
        if not self._asked or self._intake.samples_through < state.last:
            return False
        return await self._stepper.holds_log()

    async def make(self) -> list[GroupClosedRecord] | None:
        """Makes room, or returns what to record so that there will be; None: take what there is as a smaller batch.

        Raises UnrecoverableError when nothing in the log can be trained, and in ordered mode (whose batches are exact).
        """
        if await self._stepper.let_go():
            _log.warning("SAMPLES is full: consumed samples were let go before their time; raise bus.max_store_bytes")
            return []
        if self._context.config.trainer.ordered:
            raise self._too_small("ordered mode trains whole batches")
        if self._planner.groups.complete or self._planner.has_drops:
            _log.warning(
                "SAMPLES is full before a batch is: it holds %d complete groups, trainer.groups_per_batch is %d. A smaller"
                " batch is trained; raise bus.max_store_bytes (%d bytes), or lower groups_per_batch",
                self._planner.groups.complete,
                self._context.config.trainer.groups_per_batch,
                self._context.config.bus.max_store_bytes,
            )
            return None
        return [self._without_missing()]

    def _without_missing(self) -> GroupClosedRecord:
        closing = self._planner.groups.oldest()
        if closing is None:
            raise self._too_small("not one execution in it can be trained")
        _log.warning(
            "SAMPLES is full behind group %s, which goes on without members %s; raise bus.max_store_bytes, or set"
            " groups.deadline_s",
            closing.group,
            closing.missing,
        )
        return closing

    def _too_small(self, why: str) -> UnrecoverableError:
        return UnrecoverableError(
            f"SAMPLES is full with {self._planner.groups.complete} complete groups, a batch needs"
            f" {self._context.config.trainer.groups_per_batch} (trainer.groups_per_batch), and {why}. bus.max_store_bytes is"
            f" {self._context.config.bus.max_store_bytes}: start a run with more, or with a smaller batch"
        )
