"""A full stream is tried again by one publisher at a time, and those that wait go in the order in which they came."""

from __future__ import annotations

import asyncio

from physarum.bus.gate import Gate


async def test_newcomers_queue_behind_those_that_found_the_stream_full() -> None:
    gate, order = Gate(), []

    async def publisher(name: str) -> None:
        with gate.turn() as turn:
            await gate.wait(turn)
            order.append(name)

    with gate.turn() as first:
        assert gate.full(first), "the first to find it full tries again"
        with gate.turn() as second:
            assert not gate.full(second)
        others = [asyncio.create_task(publisher(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        await asyncio.wait_for(gate.wait(first), 1.0)
        assert order == []
    await asyncio.gather(*others)
    assert order == ["a", "b", "c"]


async def test_a_prober_that_gives_up_hands_over() -> None:
    gate = Gate()
    with gate.turn() as first:
        assert gate.full(first)
    with gate.turn() as second:
        await asyncio.wait_for(gate.wait(second), 1.0)
        assert gate.full(second)
