"""What a supervisor is to others: a heartbeat, by which its actors know that they are claimed, and a control service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, Final

import msgspec
import psutil

from physarum.actors.supervising import SUPERVISOR
from physarum.bus import control
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.presence import GONE, Heartbeat, announce
from physarum.bus.publisher import Publisher

_log = logging.getLogger(__name__)

_LAST_SEQUENCE: Final = 1 << 62
"""The goodbye comes after every other heartbeat of this process."""


@contextlib.asynccontextmanager
async def announced(
    bus: Bus, publisher: Publisher, instance: str, period_s: float, facts: Mapping[str, Any]
) -> AsyncIterator[None]:
    """Actors see that they are claimed; they drain by themselves after run.orphan_timeout_s without a supervisor."""
    beat = Heartbeat(
        role=SUPERVISOR,
        instance=instance,
        state="ready",
        pid=os.getpid(),
        host=socket.gethostname(),
        started_at=psutil.Process().create_time(),
        sequence=0,
        facts=dict(facts),
    )
    try:
        async with background(_announce_for_ever(bus, publisher, beat, period_s), "heartbeat"):
            yield
    finally:
        goodbye = msgspec.structs.replace(beat, sequence=_LAST_SEQUENCE, state=GONE)
        await _announce_once(bus, publisher, goodbye, period_s)


@contextlib.asynccontextmanager
async def controlled(bus: Bus, instance: str, verbs: Mapping[str, control.Verb]) -> AsyncIterator[None]:
    """Answers the verbs while the block runs."""
    service = await control.serve(bus, SUPERVISOR, instance, verbs)
    try:
        yield
    finally:
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(2.0):
                await service.stop()


@contextlib.asynccontextmanager
async def background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs `work` beside the block; its failure is logged and changes nothing else."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the supervisor's %s failed: %r; the run goes on without it", task.get_name(), error, exc_info=error)


async def _announce_for_ever(bus: Bus, publisher: Publisher, beat: Heartbeat, period_s: float) -> None:
    while True:
        beat = msgspec.structs.replace(beat, sequence=beat.sequence + 1, progress_at=time.time())
        await _announce_once(bus, publisher, beat, period_s)
        await asyncio.sleep(period_s)


async def _announce_once(bus: Bus, publisher: Publisher, beat: Heartbeat, timeout_s: float) -> None:
    try:
        await announce(bus, publisher, beat, timeout_s=timeout_s)
    except BusError as error:
        _log.info("the supervisor's heartbeat was not stored: %s", error)
