"""What listens to other machines is announced at an address that they reach, and asks for a key that stands nowhere."""

from __future__ import annotations

import stat
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.actors import address
from physarum.actors.engine.opening import key_file, write_key
from physarum.agents.connections import open_session
from physarum.agents.engine_key import bearer, engine_key, keyed


def test_the_address_is_the_one_that_is_named_or_that_of_the_way_to_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(address.VARIABLE, raising=False)
    assert address.towards("nats://127.0.0.1:4222,nats://elsewhere:1") == "127.0.0.1"
    assert address.towards("nats://no-such-host.invalid:4222") == address.own_address()
    monkeypatch.setenv(address.VARIABLE, "10.1.2.3")
    assert address.towards("nats://127.0.0.1:4222") == address.own_address() == "10.1.2.3"


def test_an_address_of_its_own_host_alone_is_told_from_others() -> None:
    assert [address.is_loopback(one) for one in ("127.0.1.1", "::1", "localhost", "10.0.0.1", "gpu-1")] == [
        *(True, True, True),
        *(False, False),
    ]
    assert address.http_url("fd00::1", 80) == "http://[fd00::1]:80" and address.http_url("a", 80) == "http://a:80"


def test_a_key_is_not_the_token_and_its_file_is_nobody_elses(tmp_path: Path) -> None:
    key = engine_key("secret")
    assert len(key) == 64 and "secret" not in key and key != engine_key("other")
    path = key_file(tmp_path / "policy-0.sglang.log")
    path.write_text("of before")
    write_key(path, key)
    assert path.read_text() == f'api-key: "{key}"\n' and stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_key_goes_with_each_request_but_to_servers_of_somebody_else() -> None:
    async def told(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("Authorization", "nothing"))

    async def asked(session: aiohttp.ClientSession, server: TestServer) -> str:
        async with session.get(server.make_url("/generate")) as answer:
            return await answer.text()

    app, other = web.Application(), web.Application()
    for one in (app, other):
        one.router.add_get("/generate", told)
    async with TestServer(app) as ours, TestServer(other) as theirs:
        async with open_session([keyed("k", [str(theirs.make_url("/v1"))])]) as session:
            assert [await asked(session, one) for one in (ours, theirs)] == ["Bearer k", "nothing"]
        async with open_session() as session:
            assert await asked(session, ours) == "nothing"
    assert bearer(None) == {}
