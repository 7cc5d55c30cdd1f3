"""What runs beside an engine's updates for ever: where it ends, so does the actor, by name, and is started anew."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bus_fixture import DEADLINE_S

from physarum.actors.engine.following import _with
from physarum.actors.engine.listening import listen
from physarum.actors.errors import ActorError, UnrecoverableError
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.weightsync.broadcast import ROUND, Round
from physarum.weightsync.transports.nccl import NcclTransport

pytestmark = pytest.mark.timeout(30)


class FailingTransport:
    name = "policy-0"

    def join(self, one: Round) -> None:
        raise ValueError("no such round")


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_an_ear_that_fails_ends_the_actor_by_name(bus: Bus, publisher: Publisher) -> None:
    actor = SimpleNamespace(
        bus=bus, publisher=publisher, config=SimpleNamespace(model=SimpleNamespace(name="policy")), facts={}
    )
    ear = asyncio.create_task(
        listen(cast(Any, actor), cast(NcclTransport, FailingTransport())), name="the ear for broadcasts"
    )
    one = Round(name="group", epoch=1, label="policy@1.1", host="h", port=1, members=("policy-0",), until=0.0)
    await Register(bus, publisher, "weights", Round).put(one, ROUND, "policy")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ActorError, match=r"the ear for broadcasts ended \(ValueError\('no such round'\)\)"):
            await _with([ear], for_ever())


async def test_what_the_work_itself_ends_with_is_told_as_it_is() -> None:
    async def fails() -> None:
        raise UnrecoverableError("wrong model")

    ear = asyncio.create_task(for_ever())
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UnrecoverableError, match="wrong model"):
            await _with([ear], fails())
    ear.cancel()
