"""Whose turn it is to stand still: at most so many engines of a group are updated at the same time.

    engine: verified --take--> [holders in the register, compare-and-set] --pause, load, go on--> give back

A holder that died is passed over after `limit_s`, the longest that an update may take; whoever waits is woken by the register.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from physarum.bus.errors import BusError, WrongSequenceError
from physarum.bus.register import Entry, Register

_log = logging.getLogger(__name__)


class Turn(msgspec.Struct, frozen=True):
    """Who is being updated, and until when that may last (Unix seconds)."""

    holders: dict[str, float] = {}


class Turns:
    """The turns of `me` among those who share `key`. `at_once` 0: nobody waits for anybody."""

    def __init__(self, register: Register[Turn], key: tuple[str, ...], me: str, at_once: int, limit_s: float) -> None:
        self._register = register
        self._key = key
        self._me = me
        self._at_once = at_once
        self._limit_s = limit_s

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Waits for a turn, and gives it back. Raises BusError."""
        if not self._at_once:
            yield
            return
        try:
            await self._acquire()
            yield
        finally:
            await self._release()

    async def _acquire(self) -> None:
        async with self._register.watch(*self._key) as changed:
            while True:
                changed.clear()
                entry = await self._register.get(*self._key)
                holders = _present(entry)
                if len(holders.keys() - {self._me}) < self._at_once:
                    holders[self._me] = time.time() + self._limit_s
                    with contextlib.suppress(WrongSequenceError):  # somebody else's turn began or ended: look again
                        await self._register.compare_and_set(Turn(holders), entry.revision, *self._key)
                        return
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(min(holders.values()) - time.time(), 0.0)):
                        await changed.wait()

    async def _release(self) -> None:
        """What cannot be given back ends by itself."""
        try:
            while True:
                entry = await self._register.get(*self._key)
                holders = _present(entry)
                if holders.pop(self._me, None) is None:
                    return
                with contextlib.suppress(WrongSequenceError):
                    await self._register.compare_and_set(Turn(holders), entry.revision, *self._key)
                    return
        except BusError as error:
            _log.warning("the turn of %s is not given back, it ends in %g s: %s", self._me, self._limit_s, error)


def _present(entry: Entry[Turn]) -> dict[str, float]:
    now = time.time()
    return {name: until for name, until in (entry.value.holders if entry.value else {}).items() if until > now}
