"""Episodes on a prefill and a decode server: one room for both; whatever half moves or dies, no token is of other weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from aiohttp import web
from test_fault_rollout import ASKING, StubEngine, actor, issue, ordinals, until
from test_rollout_fleet import Presence

from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution

pytestmark = pytest.mark.timeout(60)
V1, V2 = "policy@1.0", "policy@1.1"


class Half(StubEngine):
    """Keeps what it was asked. `waiting`: requests whose client has not gone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.waiting = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.waiting += 1
        try:
            return await super().handle(request)
        finally:
            self.waiting -= 1


def body(*spans: tuple[str, int], finish: str = "stop", prompt: int) -> web.Response:
    made, parts, start = sum(count for _, count in spans), [], 0
    for version, count in spans:
        parts.append({"version": version, "start": start, "end": start + count})
        start += count
    meta = {
        "finish_reason": {"type": finish}, "prompt_tokens": prompt, "cached_tokens": 0, "weight_version": spans[-1][0],
        "weight_versions": parts, "output_token_logprobs": [[-0.5, 7 + at, None] for at in range(made)],
    }  # fmt: skip
    return web.json_response({"output_ids": list(range(7, 7 + made)), "meta_info": meta})


class Pair:
    """Both halves, announced."""

    def __init__(self, presence: Presence) -> None:
        self.prefill, self.decode = Half(), Half()
        self.prefill.answer = self._first
        self.decode.answer = self._all
        self._presence = presence
        self.versions = (V1, V1)

    async def announce(self, ports: tuple[int, int]) -> None:
        for name, role, port, version in zip(
            ("policy-0", "policy-1"), ("prefill", "decode"), ports, self.versions, strict=True
        ):
            facts = {"group": "policy", "url": f"http://127.0.0.1:{port}", "version": version, "role": role}
            facts |= {"bootstrap_port": 9123} if role == "prefill" else {}
            await self._presence.says("engine", name, "ready", 1.0, facts)

    async def _first(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return body((V1, 1), finish="length", prompt=len(asked["input_ids"]))

    async def _all(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return body((V1, 2), prompt=len(asked["input_ids"]))


@pytest.fixture
def pair(bus: Bus, publisher: Publisher) -> Pair:
    return Pair(Presence(bus, publisher))


async def spans_of(bus: Bus, count: int) -> list[tuple[str, int]]:
    entries = await until(bus, "episodes", count)
    samples = [sample for entry in entries for sample in decode(entry.data, Execution).samples]
    return [(span.version, span.end - span.start) for sample in samples for span in sample.spans]


async def test_both_halves_get_the_same_request_under_one_room(
    tmp_path: Path, bus: Bus, publisher: Publisher, pair: Pair
) -> None:
    async with pair.prefill.serving() as first, pair.decode.serving() as second:
        await pair.announce((first, second))
        made = actor(tmp_path, bus, publisher, *ASKING)
        await issue(made, ["ask"] * 5)
        async with running(made):
            assert await ordinals(bus, 5) == Counter(range(5))
    by_room = {one["bootstrap_room"]: one for one in pair.decode.asked}
    assert len(by_room) == 5
    assert {one["bootstrap_room"]: one for one in pair.prefill.asked} == by_room
    assert {(one["bootstrap_host"], one["bootstrap_port"]) for one in pair.decode.asked} == {("127.0.0.1", 9123)}
    assert {one["extra_key"] for one in pair.prefill.asked} == {V1}


async def test_a_prefill_server_that_moved_lets_the_other_half_go_at_once(
    tmp_path: Path, bus: Bus, publisher: Publisher, pair: Pair
) -> None:
    """The decode server would never answer: the request ends there because its client went, and is made of new weights."""

    async def moved(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return body((V2, 1), finish="length", prompt=len(asked["input_ids"]))

    async def later(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if asked["extra_key"] == V1:
            await asyncio.Event().wait()
        return body((V2, 2), prompt=len(asked["input_ids"]))

    pair.prefill.answer, pair.decode.answer = moved, later
    async with pair.prefill.serving() as first, pair.decode.serving() as second:
        await pair.announce((first, second))
        made = actor(tmp_path, bus, publisher, *ASKING)
        await issue(made, ["ask"])
        async with running(made):
            async with asyncio.timeout(20):
                while not pair.prefill.asked or pair.decode.waiting:
                    await asyncio.sleep(0.01)
            pair.versions = (V2, V2)
            await pair.announce((first, second))
            assert await spans_of(bus, 1) == [(V2, 2)]
    assert [one["extra_key"] for one in pair.prefill.asked] == [V1, V2]


async def test_what_a_decode_server_made_after_it_moved_is_made_again_behind_the_rest(
    tmp_path: Path, bus: Bus, publisher: Publisher, pair: Pair
) -> None:
    async def midway(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if len(pair.decode.asked) == 1:
            pair.versions = (V2, V2)
            await pair.announce(ports)
            return body((V1, 3), (V2, 2), prompt=len(asked["input_ids"]))
        return body((V2, 2), prompt=len(asked["input_ids"]))

    async def current(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return body((asked["extra_key"], 1), finish="length", prompt=len(asked["input_ids"]))

    pair.prefill.answer, pair.decode.answer = current, midway
    async with pair.prefill.serving() as first, pair.decode.serving() as second:
        ports = (first, second)
        await pair.announce(ports)
        made = actor(tmp_path, bus, publisher, *ASKING)
        await issue(made, ["ask"])
        async with running(made):
            assert await spans_of(bus, 1) == [(V1, 3), (V2, 2)]
    before, after = pair.decode.asked
    assert after["input_ids"] == [*before["input_ids"], 7, 8, 9]
    assert after["sampling_params"]["max_new_tokens"] == before["sampling_params"]["max_new_tokens"] - 3


async def test_a_prefill_server_that_is_gone_costs_no_decode_server_its_requests(
    tmp_path: Path, bus: Bus, publisher: Publisher, pair: Pair
) -> None:
    async with pair.prefill.serving() as first, pair.decode.serving() as second:
        await pair.announce((1, second))  # nobody listens there
        other = {"group": "policy", "url": f"http://127.0.0.1:{first}", "version": V1, "role": "prefill"}
        await pair._presence.says("engine", "policy-2", "ready", 1.0, other | {"bootstrap_port": 9124})
        made = actor(tmp_path, bus, publisher, *ASKING, "bus.max_deliver=1")
        await issue(made, ["ask"] * 12)
        async with running(made):
            assert await ordinals(bus, 12) == Counter(range(12))
        assert {one["bootstrap_port"] for one in pair.prefill.asked} == {9124}
