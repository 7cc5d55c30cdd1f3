"""`python -m sglang_router.launch_router`: the worker list of sglang-router 0.3.2, requests in turn to those that are there."""

from __future__ import annotations

import argparse
import itertools

import aiohttp
from aiohttp import web

from sglang_router.router_args import RouterArgs


class StubRouter:
    """`workers`: by id."""

    def __init__(self) -> None:
        self._workers: dict[str, str] = {}
        self._numbers = itertools.count()

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_get("/workers", self._list)
        application.router.add_post("/workers", self._add)
        application.router.add_delete("/workers/{name}", self._remove)
        application.router.add_post("/generate", self._generate)
        return application

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def _list(self, http: web.Request) -> web.Response:
        return web.json_response({"workers": [{"id": name, "url": url} for name, url in self._workers.items()]})

    async def _add(self, http: web.Request) -> web.Response:
        name = f"worker-{next(self._numbers)}"
        self._workers[name] = (await http.json())["url"]
        return web.json_response({"worker_id": name}, status=202)

    async def _remove(self, http: web.Request) -> web.Response:
        found = self._workers.pop(http.match_info["name"], None)
        return web.Response(status=404 if found is None else 202)

    async def _generate(self, http: web.Request) -> web.Response:
        if not self._workers:
            return web.Response(status=503)
        urls = list(self._workers.values())
        url = urls[next(self._numbers) % len(urls)]
        body, headers = await http.read(), {"Content-Type": "application/json", "X-Through": "router"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/generate", data=body, headers=headers) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    arguments = parser.parse_args()
    web.run_app(StubRouter().application(), host=arguments.host, port=arguments.port, print=None, access_log=None)
