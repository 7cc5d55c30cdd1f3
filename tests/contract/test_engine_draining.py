"""An engine that is drained ends its requests with the tokens they have: nothing that it made is lost."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from actor_fixture import eventually, make_context
from safetensors.numpy import save_file

from physarum.actors.engine.actor import EngineActor
from physarum.agents.engine_wire import Reply, build_request, parse_reply
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)

STUB = Path(__file__).resolve().parents[1] / "stub_engine"
PROMPT = np.arange(5, dtype=np.int32)


async def generate(url: str) -> Reply:
    """More than the stub makes in a minute."""
    body = build_request(PROMPT, {"max_new_tokens": 1_000_000}, "s/0/0/0:1", None)
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", data=body) as response:
        assert response.status == 200, await response.text()
        return parse_reply(await response.read(), url, len(PROMPT), lambda label: label)


async def test_a_drained_engine_gives_back_what_it_has_made(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    model = tmp_path / "judge"
    model.mkdir()
    save_file({"w": np.ones(4, np.float32)}, model / "model.safetensors")
    group = (
        f"engines.judge={{model: {model}, python: {sys.executable}, env: {{PYTHONPATH: {STUB}}},"
        " sglang: {stub-step-ms: 5, stub-mean-tokens: 1.0e+9}, concurrency: {period_s: 0.05}}"
    )
    made = EngineActor(make_context(tmp_path, bus, publisher, "engine", group, instance="judge-0"))
    work = asyncio.create_task(made.run())
    try:
        await eventually(lambda: made.state == "ready")
        requests = [asyncio.create_task(generate(made.facts["url"])) for _ in range(3)]
        await eventually(
            lambda: made.numbers.get("running") == 3 and made.facts["load"]["tokens"] > 3 * (len(PROMPT) + 3)
        )
        made.context.draining.set()
        async with asyncio.timeout(20):
            replies = await asyncio.gather(*requests)
            await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert all(reply.finish_reason == "abort" and len(reply.token_ids) > 3 for reply in replies)
    assert all(reply.flaw is None for reply in replies)
