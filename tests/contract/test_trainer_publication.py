"""A publication over a real bus."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from actor_fixture import make_context

from physarum.actors.trainer import publication
from physarum.actors.trainer.publication import Offer, Publication
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.version import Version
from physarum.weightsync.errors import NoRoomError
from physarum.weightsync.snapshot import Snapshot


async def test_a_version_without_room_on_the_host_is_asked_for_again(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all that comes is over age no step ever makes another one."""
    monkeypatch.setattr(publication, "_ROOM_AGAIN_S", 0.05)
    made = Publication(make_context(tmp_path, bus, publisher, "trainer"), "digest")
    asked = asyncio.Event()
    made.when_idle = asked.set

    def full() -> Snapshot:
        raise NoRoomError("the area has room for two versions; found three")

    running = asyncio.create_task(made.run())
    made.offer(Offer(Version("policy", 1, 1), full, {}))
    async with asyncio.timeout(20):
        await asked.wait()
    assert made.idle and made.debt == 1 and made.last is None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
