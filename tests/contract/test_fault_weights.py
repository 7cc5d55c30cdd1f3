"""A receiver that is stuck or gone holds up nobody: weights are fetched by each engine, there is no group of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from bus_fixture import DEADLINE_S
from checkpoint_service import TOKEN, publish, running_service, tensors
from test_weightsync_receiver import StubEngine, same

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging

pytestmark = pytest.mark.timeout(60)


def receiver(engine: StubEngine, place: Path, session: aiohttp.ClientSession) -> Receiver:
    staging = Staging(SharedArea(place), "engine-0")
    return Receiver(engine, staging, session, live=Version("policy", 1, 0), model_digest="m", chunk_timeout_s=2.0)


async def test_a_stuck_engine_does_not_keep_the_others_from_the_next_versions(tmp_path: Path) -> None:
    """One engine hangs in the middle of version 1; the trainer publishes on, and the other serves versions 1 to 3."""
    stuck, well = StubEngine(), StubEngine()
    stuck.hold = asyncio.Event()
    async with running_service(tmp_path / "service") as service, aiohttp.ClientSession() as session:
        client = CheckpointClient(service.url, TOKEN, session)
        one, other = receiver(stuck, tmp_path / "a", session), receiver(well, tmp_path / "b", session)
        first = await publish(service, client, 1, tensors(1))
        hanging = asyncio.create_task(one.apply(first, [service.url], TOKEN))
        async with asyncio.timeout(DEADLINE_S):
            await other.apply(first, [service.url], TOKEN)
            for number in (2, 3):
                await other.apply(await publish(service, client, number, tensors(number)), [service.url], TOKEN)
        assert well.label == "policy@1.3" and same(well.weights, tensors(3))
        assert stuck.label == "policy@1.0" and not hanging.done()
        stuck.hold.set()
        assert (await hanging).version == Version("policy", 1, 1)
