"""Encoders of a frozen group: each language server is told of them as they come and go, and takes traffic once it knows one."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from actor_fixture import eventually, make_context, running
from bus_fixture import DEADLINE_S
from safetensors.numpy import save_file
from test_rollout_fleet import Presence

from physarum.actors.engine.actor import EngineActor
from physarum.actors.errors import ActorError
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)
STUB = Path(__file__).resolve().parents[1] / "stub_engine"


def engine(folder: Path, bus: Bus, publisher: Publisher, number: int, *further: str) -> EngineActor:
    """Of a group with one encoder (0) and one language server (1)."""
    model = folder / "judge"
    model.mkdir(exist_ok=True)
    save_file({"w": np.ones(4, np.float32)}, model / "model.safetensors")
    group = (
        f"engines.judge={{model: {model}, python: {sys.executable}, env: {{PYTHONPATH: {STUB}}},"
        " servers: [{role: encoder}, {role: regular}]}"
    )
    return EngineActor(make_context(folder, bus, publisher, "engine", group, *further, instance=f"judge-{number}"))


async def known(server: EngineActor) -> list[str]:
    url = f"http://127.0.0.1:{server.facts['bootstrap_port']}/list_encoder_urls"
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession() as session, session.get(url, timeout=timeout) as answer:
        found: list[str] = (await answer.json())["encoder_urls"]
        return found


async def test_a_language_server_follows_the_encoders_of_its_group(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    presence = Presence(bus, publisher)
    encoder, server = engine(tmp_path, bus, publisher, 0), engine(tmp_path, bus, publisher, 1)
    async with running(encoder), running(server):
        await eventually(lambda: encoder.state == "ready" and server.state == "waiting for encoders")
        assert encoder.facts["role"] == "encoder" and "version" not in encoder.facts
        await presence.says("engine", "judge-0", "ready", 1.0, encoder.facts)
        await eventually(lambda: server.state == "ready")
        assert await known(server) == [encoder.facts["url"]]
        again = {**encoder.facts, "url": "http://127.0.0.1:9"}
        await presence.says("engine", "judge-0", "ready", 2.0, again)
        async with asyncio.timeout(DEADLINE_S):
            while await known(server) != ["http://127.0.0.1:9"]:
                pass
        await presence.says("engine", "judge-0", "draining", 2.0, again)
        async with asyncio.timeout(DEADLINE_S):
            while await known(server):
                pass


@pytest.mark.slow
async def test_a_language_server_without_encoders_ends_by_name(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    server = engine(tmp_path, bus, publisher, 1, "engines.judge.start_timeout_s=2.5")
    with pytest.raises(ActorError, match="no encoder of group judge was ready within"):
        await server.run()
