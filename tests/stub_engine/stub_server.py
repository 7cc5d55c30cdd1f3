"""SGLang 0.5.23's HTTP interface as far as physarum uses it, without a model. Invariant: an update aborts no request."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import orjson
import yaml
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from stub_decoding import Decoder, Journal, Request
from stub_encoders import registry
from stub_nodes import meet, only_health
from stub_pairs import KeyValues, fetch
from stub_tokens import length

_VERSION: Final = "0.5.23+stub"
_DESCRIPTION: Final = {"components": {"schemas": {"GenerateReqInput": {"properties": {"extra_key": {}}}}}}
_LARGEST_REQUEST: Final = 64 << 20


class StubServer:
    """The routes over one decoder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._decoder: Decoder
        self._kv = KeyValues(arguments.disaggregation_bootstrap_port)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=_LARGEST_REQUEST, middlewares=keyed(api_key(self._arguments)))
        application.cleanup_ctx.append(self._decoding)
        if self._arguments.disaggregation_mode == "prefill":
            application.cleanup_ctx.append(self._bootstrap)
        if self._arguments.language_only:
            application.cleanup_ctx.append(registry(self._arguments.encoder_bootstrap_port))
        for path, handler in (
            ("/health", self._ok),
            ("/server_info", self._server_info),
            ("/model_info", self._model_info),
            ("/openapi.json", self._described),
            ("/v1/loads", self._loads),
        ):
            application.router.add_get(path, handler)
        for path, handler in (
            ("/generate", self._generate),
            ("/pause_generation", self._pause),
            ("/continue_generation", self._continue),
            ("/update_weights_from_disk", self._update),
            ("/update_weight_version", self._rename),
            ("/flush_cache", self._ok),
            ("/abort_request", self._abort),
        ):
            application.router.add_post(path, handler)
        return application

    async def _decoding(self, application: web.Application) -> AsyncIterator[None]:
        a = self._arguments
        self._decoder = Decoder(Path(a.model_path), a.weight_version, a.stub_step_ms / 1e3, Journal(a.stub_log))
        task = asyncio.create_task(self._decoder.run(), name="decode")
        yield
        task.cancel()

    async def _bootstrap(self, application: web.Application) -> AsyncIterator[None]:
        async with self._kv.serving():
            yield

    async def _generate(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        task, start = str(body["rid"]).rpartition(":")[0], len(body["input_ids"])
        if self._arguments.disaggregation_mode == "prefill":
            return await self._prefill(body, task, start)
        request = Request(
            task=task,
            start=start,
            wanted=length(task, start, self._arguments.stub_mean_tokens),
            budget=int(body["sampling_params"]["max_new_tokens"]),
            done=asyncio.get_running_loop().create_future(),
        )
        if self._arguments.disaggregation_mode == "decode":
            request.kv = await fetch(body)
        await self._decoder.generate(request)
        return web.Response(body=orjson.dumps(self._reply(request)), content_type="application/json")

    async def _prefill(self, body: dict[str, Any], task: str, start: int) -> web.Response:
        """One token, and the KV that it was made over; a prompt that waits through an update is read by the new weights."""
        done = asyncio.get_running_loop().create_future()
        request = Request(task=task, start=start, wanted=1, budget=1, done=done)
        await self._decoder.generate(request)
        if not request.aborted:
            self._kv.put(int(body["bootstrap_room"]), self._decoder.weights_of(request))
        return web.Response(body=orjson.dumps(self._reply(request)), content_type="application/json")

    def _reply(self, request: Request) -> dict[str, Any]:
        whole = "stop" if request.wanted <= request.budget else "length"
        finish = "abort" if request.aborted else whole
        pairs = zip(request.logprobs, request.tokens, strict=True)
        return {
            "output_ids": request.tokens,
            "meta_info": {
                "finish_reason": {"type": finish},
                "weight_version": self._decoder.label,
                "weight_versions": request.spans,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
                "prompt_tokens": request.start,
                "cached_tokens": 0,
            },
        }

    async def _pause(self, http: web.Request) -> web.Response:
        if orjson.loads(await http.read() or b"{}").get("mode") not in ("retract", "in_place"):
            return web.Response(status=400, text="mode retract or in_place expected: SGLang's default would abort")
        self._decoder.pause()
        return web.Response()

    async def _continue(self, http: web.Request) -> web.Response:
        self._decoder.resume()
        return web.Response()

    async def _update(self, http: web.Request) -> web.Response:
        body = orjson.loads(await http.read())
        if body["abort_all_requests"]:
            return web.Response(status=400, text="an update that aborts requests is never asked for")
        self._decoder.update(Path(body["model_path"]), body["weight_version"])
        return web.json_response({"success": True})

    async def _rename(self, http: web.Request) -> web.Response:
        self._decoder.rename(orjson.loads(await http.read())["new_version"])
        return web.json_response({"success": True})

    async def _abort(self, http: web.Request) -> web.Response:
        if not orjson.loads(await http.read())["abort_all"]:
            return web.Response(status=400, text="single requests are never aborted here")
        self._decoder.abort_all()
        return web.Response()

    async def _ok(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, http: web.Request) -> web.Response:
        return web.json_response({"version": _VERSION, "disable_radix_cache": False})

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._decoder.label, "model_path": self._arguments.model_path})

    async def _described(self, http: web.Request) -> web.Response:
        return web.json_response(_DESCRIPTION)

    async def _loads(self, http: web.Request) -> web.Response:
        return web.json_response({"loads": [self._decoder.load()]})


def api_key(arguments: argparse.Namespace) -> str:
    """Of the command line, or of the file that `--config` names."""
    written = yaml.safe_load(Path(arguments.config).read_text()) if arguments.config else {}
    return str(written.get("api-key") or arguments.api_key)


def keyed(key: str) -> list[Middleware]:
    """As in SGLang: all but health asks for the key, where there is one."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401, text="Unauthorized")
        return await handler(request)

    return [check] if key else []


def serve(arguments: argparse.Namespace) -> None:
    """Listens until it is killed, once all nodes of the engine have met."""
    whole = arguments.node_rank == 0 and not arguments.encoder_only
    application = StubServer(arguments).application() if whole else only_health()
    met = meet(arguments.nnodes, arguments.node_rank, arguments.dist_init_addr)
    application["nodes"] = met  # kept open
    web.run_app(
        application, host=arguments.host, port=arguments.port, print=None, access_log=None, handler_cancellation=True
    )
