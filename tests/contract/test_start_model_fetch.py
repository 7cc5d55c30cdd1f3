"""The start model on a machine that lacks it: whole and verified from the head, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from bus_fixture import DEADLINE_S

from physarum.actors.checkpoint.model_service import ModelService
from physarum.actors.context import RunFolder
from physarum.actors.model_files import checked_name, files_of, is_the_same
from physarum.actors.model_maker import StartModel
from physarum.actors.supervisor import model_fetch
from physarum.actors.supervisor.errors import HeadAbsentError, StartModelError
from physarum.bus.connection import Bus
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.configs.root import RootConfig
from physarum.weightsync.authentication import authentication
from physarum.weightsync.metrics import Counters

TOKEN = "PHYSARUM_TEST_TOKEN"


class Silent:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        return


class Site:
    """A head's service over `model`, and a machine's folder."""

    def __init__(self, place: Path, bus: Bus, publisher: Publisher) -> None:
        self.model, self.own = place / "model", place / "own"
        self.folder = RunFolder(place / "runs" / "r@gpu-0")
        self.folder.path.mkdir(parents=True)
        self._bus, self._publisher, self._place = bus, publisher, place
        (self.model / "sub").mkdir(parents=True)
        (self.model / "config.json").write_text('{"a": 1}')
        (self.model / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
        (self.model / "sub" / "vocab.txt").write_text("words")
        (self.model / ".cache").mkdir()
        (self.model / ".cache" / "secret").write_text("no part of the model")
        self.asked: list[str] = []
        self.alter: bytes | None = None

    def app(self) -> web.Application:
        @web.middleware
        async def watch(request: web.Request, handler: Any) -> web.StreamResponse:
            self.asked.append(request.path)
            if self.alter is not None and request.path.endswith("config.json"):
                altered, self.alter = self.alter, None
                return web.Response(body=altered)
            return await handler(request)  # type: ignore[no-any-return]

        app = web.Application(middlewares=[authentication("a token", Counters()), watch])
        app.add_routes(ModelService(self.model).routes())
        return app

    async def announce(self, server: TestServer) -> None:
        url = str(server.make_url("/")).rstrip("/")
        beat = Heartbeat(
            role="checkpoint", instance="checkpoint-0", state="ready", pid=1, host="h", started_at=1.0, sequence=1,
            facts={"url": url},
        )  # fmt: skip
        await announce(self._bus, self._publisher, beat)

    async def fetch(self, **supervisor: Any) -> StartModel:
        values: dict[str, Any] = {
            "run": {"name": "r"},
            "checkpoint": {"token_env": TOKEN},
            "model": {"path": str(self.own)},
            "source": {"hook": "a:b"},
            "trainer": {"objective": "sft", "lr": 1e-3},
            "stop": {"steps": 1},
            "supervisor": supervisor,
        }
        config = RootConfig.model_validate(values, strict=False)
        async with asyncio.timeout(DEADLINE_S):
            return await model_fetch.fetch_start_model(config, self.folder, self._bus, Silent())

    def files(self, folder: Path) -> dict[str, bytes]:
        return {file.name: (folder / file.name).read_bytes() for file in files_of(folder)}


@pytest_asyncio.fixture
async def site(tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setenv(TOKEN, "a token")
    monkeypatch.setenv("PHYSARUM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_fetch, "_AGAIN_S", 0.01)
    made = Site(tmp_path, bus, publisher)
    async with TestServer(made.app()) as server:
        await made.announce(server)
        yield made


async def test_it_comes_whole_and_a_second_machine_of_the_host_takes_it_from_there(site: Site) -> None:
    first = await site.fetch()
    assert (first.origin, first.cached) == ("head", False)
    assert site.files(site.folder.start_model) == site.files(site.model)
    assert not (site.folder.start_model / ".cache").exists()
    asked = len(site.asked)
    assert (await site.fetch()).cached and site.asked[asked:] == ["/v1/start_model"]


async def test_bytes_that_were_altered_on_the_way_are_fetched_again_and_never_linked(site: Site) -> None:
    site.alter = b'{"a": 2}'
    await site.fetch()
    assert site.files(site.folder.start_model) == site.files(site.model)
    assert site.asked.count("/v1/start_model/config.json") == 2


async def test_a_head_that_gives_other_bytes_each_time_is_named_and_nothing_is_kept(site: Site) -> None:
    await site.fetch()
    (site.model / "config.json").write_text('{"a": 3}')  # listed, then changed
    for path in (site._place / "cache").rglob("made.json"):
        path.unlink()
    site.folder.start_model.unlink()
    with pytest.raises(StartModelError, match=r"config\.json: its bytes have the digest .*, expected"):
        await site.fetch()
    assert not site.folder.start_model.exists()


async def test_a_folder_of_its_own_is_taken_where_it_holds_the_same(site: Site) -> None:
    for name, data in site.files(site.model).items():
        (site.own / name).parent.mkdir(parents=True, exist_ok=True)
        (site.own / name).write_bytes(data)
    assert (await site.fetch()).origin == "path"
    assert site.folder.start_model.resolve() == site.own.resolve()
    (site.own / "config.json").write_text('{"a": 2}')
    assert (await site.fetch()).origin == "head", "another tokenizer or configuration is another model"
    (site.own / "model.safetensors").write_bytes(b"shorter")
    assert not is_the_same(site.own, files_of(site.model)) and not is_the_same(site.own, [])


async def test_without_the_token_nothing_is_given(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "another")
    with pytest.raises(StartModelError, match="the list of its files: 401"):
        await site.fetch()


async def test_without_a_checkpoint_actor_the_wait_has_an_end(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "a token")
    with pytest.raises(HeadAbsentError, match=r"no checkpoint actor of run r .* within 0\.1 s"):
        await Site(tmp_path, bus, publisher).fetch(join_timeout_s=0.1)


@pytest.mark.parametrize("name", ["../etc/passwd", "/etc/passwd", "a//b", "a/../b", ".hidden", "", "a\\b", "a\0"])
def test_a_name_leads_nowhere_but_into_its_folder(name: str) -> None:
    with pytest.raises(ValueError, match="expected a relative name"):
        checked_name(name)
