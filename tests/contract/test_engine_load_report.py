"""An engine actor attached to a server: its load and limit on presence, and its state while the server does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actor_fixture import eventually, make_context, running
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.actors.engine.actor import EngineActor
from physarum.actors.engine.load import UNREACHABLE, Announced
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


class Server:
    """A judge's SGLang as far as its actor asks it. `well`: it answers."""

    def __init__(self) -> None:
        self.well = True

    async def answer(self, request: web.Request) -> web.Response:
        if not self.well:
            return web.Response(status=503, text="not now")
        load = {
            "num_running_reqs": 5, "num_waiting_reqs": 0, "num_used_tokens": 700, "token_usage": 0.07,
            "gen_throughput": 100.0, "max_total_num_tokens": 10_000, "max_running_requests": 256,
        }  # fmt: skip
        answers: dict[str, Any] = {
            "/server_info": {"version": "0.5.23", "context_length": 500},
            "/openapi.json": {},
            "/v1/loads": {"loads": [load]},
        }
        return web.json_response(answers.get(request.path, {}))


async def test_load_and_limit_are_on_presence_and_a_silent_server_takes_no_traffic(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with TestServer(app) as http:
        url = str(http.make_url("/"))
        group = f"engines.judge={{model: {tmp_path}, url: ['{url}'], concurrency: {{period_s: 0.02}}}}"
        made = EngineActor(make_context(tmp_path, bus, publisher, "engine", group, instance="judge-0"))
        async with running(made), asyncio.timeout(20):
            await eventually(lambda: made.state == "ready")
            announced = msgspec.convert(made.facts["load"], Announced)
            assert announced == Announced(there=5, tokens=700, limit=16, capacity=10_000), "0.8 * 10,000 / 500"
            server.well = False
            await eventually(lambda: made.state == UNREACHABLE)
            server.well = True
            await eventually(lambda: made.state == "ready")
