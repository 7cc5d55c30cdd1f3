"""What the control says to servers it cannot update safely, to slow ones, broken ones, and ones that are not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import (
    EngineAnswerError,
    EngineCapabilityError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from physarum.actors.engine.gate import Probe
from physarum.weightsync.manifest import Manifest

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]


class OldServer:
    """Answers as sglang 0.5.15.post1 does; every request body by path."""

    def __init__(self, radix_cache: bool, extra_key: bool = True) -> None:
        self.bodies: dict[str, Any] = {}
        self._info = {"version": "0.5.15.post1", "disable_radix_cache": not radix_cache}
        properties = {"extra_key": {}} if extra_key else {}
        self._described = {"components": {"schemas": {"GenerateReqInput": {"properties": properties}}}}

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies[request.path] = await request.json() if request.can_read_body else None
        answers: dict[str, Any] = {
            "/server_info": self._info,
            "/openapi.json": self._described,
            "/update_weights_from_disk": {"success": True},
        }
        return web.json_response(answers.get(request.path, {}))


@asynccontextmanager
async def control_of(handler: Callable[[web.Request], Any], timeout_s: float = 5.0) -> AsyncIterator[EngineControl]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield EngineControl(str(server.make_url("/")), session, timeout_s)


async def test_server_that_cannot_flush_is_refused_before_it_is_paused() -> None:
    server = OldServer(radix_cache=True)
    async with control_of(server.answer) as control:
        with pytest.raises(EngineCapabilityError, match=r"0\.5\.15\.post1 cannot flush .*disable-radix-cache: true"):
            await control.pause("retract")
    assert "/pause_generation" not in server.bodies


async def test_server_that_cannot_flush_is_never_asked_to() -> None:
    server = OldServer(radix_cache=False)
    async with control_of(server.answer) as control:
        await control.pause("retract")
        await control.update_from_disk(Path("/new"), "policy@1.1", "retract")
        can = await control.capabilities()
    assert server.bodies["/pause_generation"] == {"mode": "retract"}
    body = server.bodies["/update_weights_from_disk"]
    assert body["flush_cache"] is False and body["abort_all_requests"] is False
    assert (can.spans, can.extra_key, can.flush_while_queued, can.radix_cache) == (False, True, False, False)


async def test_a_gate_waits_for_an_engine_that_is_busy_with_what_it_had() -> None:
    async def busy(request: web.Request) -> web.Response:
        await asyncio.sleep(0.3)
        return web.json_response({"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 7, None]]}})

    async with control_of(busy, timeout_s=0.1) as control:
        manifest = cast(Manifest, None)
        probe = Probe(control.base_url, manifest, previous=None, vocabulary=8, timeout_s=10.0, control=control)
        assert await probe.logprobs([5, 7]) == [-0.5]


async def test_in_place_needs_extra_key_or_no_cache() -> None:
    async with control_of(OldServer(radix_cache=True, extra_key=False).answer) as control:
        with pytest.raises(EngineCapabilityError, match="knows no extra_key"):
            await control.pause("in_place")
    for server in (OldServer(radix_cache=True), OldServer(radix_cache=False, extra_key=False)):
        async with control_of(server.answer) as control:
            await control.pause("in_place")


async def test_nothing_is_ever_aborted_by_accident() -> None:
    server = OldServer(radix_cache=False)
    async with control_of(server.answer) as control:
        await control.set_version_label("policy@1.2")
        await control.abort("one")
        with pytest.raises(ValueError, match="found an empty one"):
            await control.abort("")
    assert server.bodies["/update_weight_version"] == {"new_version": "policy@1.2", "abort_all_requests": False}
    assert server.bodies["/abort_request"] == {"rid": "one", "abort_all": False}


async def test_every_failure_has_a_name() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=400, text="weights were not found")

    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def mumble(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async with control_of(refuse) as control:
        with pytest.raises(EngineRefusedError, match="answered 400: weights were not found") as caught:
            await control.server_info()
        assert (caught.value.status, caught.value.body) == (400, "weights were not found")
    async with control_of(hang, timeout_s=0.1) as control:
        with pytest.raises(EngineTimeoutError, match=r"had no answer within 0\.1 s"):
            await control.continue_generation()
    async with control_of(mumble) as control:
        with pytest.raises(EngineAnswerError, match="'ok'; expected a JSON object"):
            await control.model_info()
        with pytest.raises(EngineAnswerError):
            await control.loads()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineUnreachableError, match="is the engine up"):
            await EngineControl("http://127.0.0.1:9", session).health()


@pytest.mark.parametrize(
    ("draft", "selector"), [(None, "all"), ("/model", "all"), ("/start", "all"), ("/draft", "target")]
)
async def test_a_draft_model_of_its_own_gets_no_version(draft: str | None, selector: str) -> None:
    """One that is in the target's folder gets its tensors with the target, also after an update changed the folder's name."""
    bodies: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        bodies[request.path] = await request.json() if request.can_read_body else None
        info = {
            "version": "0.5.23",
            "speculative_draft_model_path": draft,
            "model_path": "/model",
            "tokenizer_path": "/start",
        }
        described = {"paths": {"/begin_weight_update": {}}}
        answers = {"/server_info": info, "/openapi.json": described}
        return web.json_response(answers.get(request.path, {"success": True}))

    async with control_of(answer) as control:
        assert (await control.capabilities()).own_draft == (selector == "target")
        await control.update_from_tensors(["payload"], "policy@1.1", "retract")
    assert bodies["/begin_weight_update"] == {"selector": selector}
    assert bodies["/update_weights_from_tensor"]["selector"] == selector
