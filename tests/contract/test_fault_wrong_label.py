"""The label of the wrong version: weights change while requests run, and again between a last token and its answer.

A peer read the version after the reply and put it on tokens that older weights had made. The engine here gives every token an
id of its own and writes down which weights made it, so that whatever the client says can be looked up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.agents.client import EngineClient
from physarum.agents.connections import open_session
from physarum.agents.fleet.choice import Wanted
from physarum.agents.protocols import Generation
from physarum.agents.retries import RetryPolicy
from physarum.agents.routing import EngineRef
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.version import Version

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

REQUESTS = 40
TOKENS = 24
RETRY = RetryPolicy(attempts=64, base_s=0.001, max_s=0.002, deadline_s=20.0, request_timeout_s=10.0)


@dataclass(eq=False)
class Running:
    wanted: int
    done: asyncio.Future[str]
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Takes steps for ever; at each one it may take other weights, announce them, or abort somebody. Also its router."""

    def __init__(self, seed: int, spans: bool) -> None:
        """`spans`: it says which weights made which token (SGLang 0.5.23), or only what is live at the end (0.5.15)."""
        self._random, self._spans = random.Random(seed), spans
        self._running: list[Running] = []
        self.log: list[int] = []
        """The number of the weights that made each token; a token's id is its place."""
        self.number = self.announced = self.aborted = 0
        self.url = ""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            for one in self._running:
                if not one.done.done():
                    self._step(one)
            self._change(0.05)

    def _step(self, one: Running) -> None:
        one.tokens.append(len(self.log))
        self.log.append(self.number)
        if len(one.tokens) == one.wanted:
            one.done.set_result("length")
        elif self._random.random() < 0.02:
            self.aborted += 1
            one.done.set_result("abort")

    def _change(self, share: float) -> None:
        """New weights are announced some time after they are live."""
        if self._random.random() < share:
            self.announced, self.number = self.number, self.number + 1

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        one = Running(body["sampling_params"]["max_new_tokens"], asyncio.get_running_loop().create_future())
        self._running.append(one)
        finish = await one.done
        self._running.remove(one)
        self._change(0.5)  # the answer is under way
        meta = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": _label(self.number),
            "weight_versions": list(self._versions(one.tokens)) if self._spans else None,
            "output_token_logprobs": [[-0.5, token, None] for token in one.tokens],
        }
        return web.json_response({"text": "", "output_ids": one.tokens, "meta_info": meta})

    def _versions(self, tokens: list[int]) -> Iterator[dict[str, Any]]:
        end = 0
        for number, made in groupby(tokens, lambda token: self.log[token]):
            start, end = end, end + len(list(made))
            yield {"version": _label(number), "start": start, "end": end}

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        return EngineRef(self.url, "e0", _label(self.announced))

    def release(self, ref: EngineRef) -> None: ...

    def served(self, ref: EngineRef, made: int) -> None: ...

    def failed(self, ref: EngineRef, error: Exception) -> None: ...


def _label(number: int) -> str:
    return str(Version("policy", 1, number))


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    stepping = asyncio.create_task(engine.run())
    try:
        async with TestServer(app) as server, open_session() as session:
            engine.url = str(server.make_url("/"))
            yield EngineClient(session, engine, FolderTokenizer(Path("unused")), retry=RETRY, rng=random.Random(0))
    finally:
        stepping.cancel()


async def generations(engine: Engine) -> list[Generation]:
    async with serving(engine) as client:
        asked = (client.generate([1, 2, 3], max_new_tokens=TOKENS) for _ in range(REQUESTS))
        found = list(await asyncio.gather(*asked))
    assert engine.number > 3 and engine.aborted > 3
    assert all(len(one.token_ids) == TOKENS == one.spans[-1].end for one in found)
    assert any(len(one.spans) > 1 for one in found)
    return found


def numbers(generation: Generation) -> list[int]:
    """What the client says of each token."""
    return [Version.parse(span.version).number for span in generation.spans for _ in range(span.start, span.end)]


@pytest.mark.parametrize("seed", range(5))
async def test_every_token_has_the_label_that_the_engine_wrote_down_for_it(seed: int) -> None:
    engine = Engine(seed, spans=True)
    for one in await generations(engine):
        assert numbers(one) == [engine.log[token] for token in one.token_ids]
        assert not one.conservative and not one.flaws


@pytest.mark.parametrize("seed", range(5))
async def test_an_engine_that_says_one_version_makes_no_token_younger_than_it_is(seed: int) -> None:
    """What was announced before a request went out: the age bound then holds for every token, some seem older."""
    engine = Engine(seed, spans=False)
    for one in await generations(engine):
        made = [engine.log[token] for token in one.token_ids]
        assert all(said <= true for said, true in zip(numbers(one), made, strict=True))
        assert one.conservative
