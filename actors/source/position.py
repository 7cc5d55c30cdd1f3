"""The source's position in the RUN register. Invariant: it moves only under the newest fencing token.

A row's tasks are published first, then the position moves past it. A crash between the two publishes the row again,
under the same ids: within the stream's window they are recognised, beyond it the planner drops the second execution.
"""

from __future__ import annotations

import logging

import msgspec

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.states import SourcePosition
from physarum.bus.errors import (
    BusRefusedError,
    BusUnreachableError,
    LeaseLostError,
    PublishTimeoutError,
    WrongSequenceError,
)
from physarum.bus.lease import Lease
from physarum.bus.register import Entry

_log = logging.getLogger(__name__)


class PositionKeeper:
    """Reads and moves the position of one source while `lease` is held."""

    def __init__(self, context: Context, source: str, lease: Lease) -> None:
        self._register = context.run_register(SourcePosition)
        self._key = (states.SOURCE_POSITION, source)
        self._lease = lease
        self._revision = 0
        self.current = SourcePosition(epoch=0, index=0, issued=0, token=lease.token)

    async def claim(self) -> SourcePosition:
        """Takes the position over: from here on, an older owner's writes are refused. Raises LeaseLostError."""
        entry = await self._register.get(*self._key)
        self._refuse_older(entry)
        self._revision = entry.revision
        found = entry.value or self.current
        await self.move(msgspec.structs.replace(found, token=self._lease.token))
        return self.current

    async def move(self, position: SourcePosition) -> None:
        """Stores the position, however long the bus is away. Raises LeaseLostError once another source has moved it."""
        while True:
            self._lease.check()
            try:
                self._revision = await self._register.compare_and_set(position, self._revision, *self._key)
                break
            except PublishTimeoutError as error:
                _log.warning("the position is not stored yet, trying again: %s", error)
            except WrongSequenceError:
                if await self._stored_already(position):
                    break
        self.current = position

    async def _stored_already(self, position: SourcePosition) -> bool:
        """After a refusal: an attempt whose receipt was lost may have stored this very position."""
        try:
            entry = await self._register.get(*self._key)
        except (BusUnreachableError, BusRefusedError) as error:  # away, or back without its streams for a moment
            _log.warning("the position cannot be read now, trying again: %s", error)
            return False
        if entry.value == position:
            self._revision = entry.revision
            return True
        raise LeaseLostError(
            f"position {'/'.join(self._key)} was moved to {entry.value} by another source; this one (token"
            f" {self._lease.token}) must stop. Nothing is lost: the other one issues on from there"
        )

    def _refuse_older(self, entry: Entry[SourcePosition]) -> None:
        if entry.value is not None and entry.value.token > self._lease.token:
            raise LeaseLostError(
                f"position {'/'.join(self._key)} belongs to token {entry.value.token}, this source holds the older"
                f" {self._lease.token}: another source took over, this one must stop"
            )
