"""Waiting that ends when the actor is asked to drain, or who is waited for is gone. All of it is on events; none polls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec

from physarum.actors.context import Context
from physarum.bus.errors import BusRefusedError, BusUnreachableError
from physarum.bus.presence import Roster
from physarum.bus.register import Register

_log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

_AGAIN_S: Final = 1.0


async def unless_draining(context: Context, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
    """The result of `work`, or None when draining came first; `work` then has `grace_s` more seconds, and is cancelled."""
    return await unless(context.draining, work, grace_s)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T], grace_s: float = 0.0) -> T | None:
    """The same, of any event."""
    task = asyncio.ensure_future(work)
    told = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and grace_s > 0:
            await asyncio.wait({task}, timeout=grace_s)
        return task.result() if task.done() else None
    finally:
        told.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def done_while(task: asyncio.Future[T], roster: Roster, holds: Callable[[], bool], look_s: float) -> bool:
    """Whether `task` is done before `holds` ends: looked at when the roster changes, at the latest after `look_s`."""
    while not task.done():
        if not holds():
            return False
        change = asyncio.create_task(roster.wait_change(look_s))
        await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
        change.cancel()
    return True


async def until(register: Register[R], satisfied: Callable[[R], bool], *key: str) -> R:
    """The value of a register's key once it satisfies the condition, however long the bus is away meanwhile."""
    while True:
        try:
            async with register.watch(*key) as changed:
                return await _watched(register, changed, satisfied, *key)
        except BusUnreachableError as error:  # raised after a deadline, so this does not spin
            _log.warning("%s cannot be watched now, trying again: %s", "/".join(key), error)


async def _watched(register: Register[R], changed: asyncio.Event, satisfied: Callable[[R], bool], *key: str) -> R:
    while True:
        changed.clear()
        try:
            value = (await register.get(*key)).value
        except BusRefusedError as error:
            # No event says when a server that is back serves its streams again, so this read alone is repeated.
            _log.warning("%s cannot be read now, trying again: %s", "/".join(key), error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await changed.wait()
            continue
        if value is not None and satisfied(value):
            return value
        await changed.wait()


def anything(value: msgspec.Struct) -> bool:
    """The condition of a key that only has to be there."""
    return True
