"""What an interruption costs on real engines: tokens prefilled again, of those that were in an engine's cache.

An abort on the same engine and an update in place cost less than 5 %; where the KV is gone, by design or by death, it is once
the whole context, and never more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from engine_fixture import LiveEngine, serve, start_engine
from engine_requests import PROMPT, TOKENS, prompt

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.handing_over import hand_over
from physarum.actors.engine.process import EngineProcess
from physarum.agents.client import EngineClient
from physarum.agents.connections import open_session
from physarum.agents.fleet.choice import Wanted
from physarum.agents.replay import Kind, Tokens
from physarum.agents.routing import EngineRef
from physarum.agents.tokenizer import FolderTokenizer
from physarum.weightsync.target import PauseMode

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(400)]

REQUESTS = 12
MADE = 16
"""Tokens that each request has made, in the mean, before it is interrupted."""
BOUND = 0.05


@dataclass
class Pair:
    """A router over two engines: a session stays where it was, as long as that engine takes requests."""

    first: LiveEngine
    second: EngineProcess
    client: EngineClient
    session: aiohttp.ClientSession
    label: str = "policy@1.0"
    open: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        name = wanted.prefers if wanted.prefers in self.open else self.open[0]
        return EngineRef(self.first.url if name == "first" else self.second.url, name, self.label)

    def release(self, ref: EngineRef) -> None: ...

    def served(self, ref: EngineRef, made: int) -> None: ...

    def failed(self, ref: EngineRef, error: Exception) -> None: ...

    def control(self, name: str) -> EngineControl:
        return EngineControl(self.first.url if name == "first" else self.second.url, self.session)

    async def interrupted(self, where: str, act: Callable[[], Awaitable[Any]]) -> dict[Kind, Tokens]:
        """All requests run at `where` and have made some tokens; then `act`. What their client counted."""
        self.open = [where]
        sampling = {"temperature": 1.0, "ignore_eos": True}
        asked = [
            asyncio.create_task(self.client.generate(prompt(number), sampling, max_new_tokens=TOKENS))
            for number in (next(self.numbers) for _ in range(REQUESTS))  # nobody asked for these prompts before
        ]
        control = self.control(where)
        while (load := await control.loads()).running < REQUESTS or load.used_tokens < REQUESTS * (PROMPT + MADE):
            await asyncio.sleep(0.02)
        await act()
        made = await asyncio.gather(*asked)
        assert all(len(one.token_ids) == TOKENS and not one.flaws for one in made)
        return self.client.replay.pop()


@pytest_asyncio.fixture
async def pair(engine: LiveEngine, tmp_path: Path) -> AsyncIterator[Pair]:
    second = await start_engine(engine.model, tmp_path / "second.log")
    try:
        async with open_session() as session:
            made = Pair(engine, second, None, session)  # type: ignore[arg-type]  # each needs the other
            made.client = EngineClient(session, made, FolderTokenizer(Path("unused")), cache_per_version=True)
            made.label = await serve(engine, made.control("first"), seed=0)
            yield made
    finally:
        await second.stop()


async def test_what_each_interruption_costs(pair: Pair, record_property: Any) -> None:
    first = pair.control("first")
    found = await pair.interrupted("first", first.abort_all)
    found |= await pair.interrupted("first", lambda: _update(pair, "in_place"))
    found |= await pair.interrupted("first", lambda: _update(pair, "retract"))
    found |= await pair.interrupted("first", lambda: _drain(pair))
    found |= await pair.interrupted("second", lambda: _kill(pair))
    costs = {kind: one.replayed / one.interrupted for kind, one in found.items()}
    record_property("replayed_of_interrupted", costs)
    assert found.keys() == {"aborted", "in_place", "retracted", "moved", "lost"}
    assert all(one.times == REQUESTS for one in found.values())
    assert costs["aborted"] < BOUND and costs["in_place"] == 0
    assert costs["retracted"] == 1
    assert 1 - BOUND < costs["moved"] <= 1 and 1 - BOUND < costs["lost"] <= 1


async def _update(pair: Pair, mode: PauseMode) -> None:
    control, label = pair.control("first"), pair.first.next_label()
    await control.pause(mode)
    await control.update_from_disk(pair.first.weights(1), label, mode)
    await control.continue_generation()
    pair.label = label


async def _drain(pair: Pair) -> None:
    pair.open = ["second"]
    await hand_over(pair.control("first"))


async def _kill(pair: Pair) -> None:
    pair.open = ["first"]
    assert pair.second.pid is not None
    root = psutil.Process(pair.second.pid)
    for process in [*root.children(recursive=True), root]:
        process.kill()
