"""The moment in which a connection breaks: what is published then is not an error of whoever published it."""

from __future__ import annotations

import asyncio

import pytest
from bus_fixture import DEADLINE_S
from nats.aio.msg import Msg

from physarum.bus.connection import Bus


async def test_a_publish_into_a_transport_that_has_just_closed_leaves_with_the_next_flush(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []
    both = asyncio.Event()

    async def hear(message: Msg) -> None:
        heard.append(message.data)
        if len(heard) == 2:
            both.set()

    await bus.subscribe(f"ph.{bus.run}.test", hear)
    client = bus.client
    client._flusher_task.cancel()  # as after it met the closed transport: the client then writes by itself
    await asyncio.gather(client._flusher_task, return_exceptions=True)

    def closed(commands: list[bytes]) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    with monkeypatch.context() as broken:
        broken.setattr(client._transport, "writelines", closed)
        await client.publish(f"ph.{bus.run}.test", b"first")
    await client.publish(f"ph.{bus.run}.test", b"second")
    await asyncio.wait_for(both.wait(), DEADLINE_S)
    assert heard == [b"first", b"second"]
