"""Somebody else's SGLang, attached by its URL: updated, left running, and noticed when it comes back with other weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from actor_fixture import make_context, register_until, running
from aiohttp import web
from aiohttp.test_utils import TestServer
from bus_fixture import DEADLINE_S
from checkpoint_service import TOKEN, Service, running_service
from engine_fixture import LiveEngine
from engine_requests import spans

from physarum.actors import states
from physarum.actors.engine.actor import EngineActor
from physarum.actors.engine.attached import PROBE, check_attached
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.gate import Probe
from physarum.actors.errors import UnrecoverableError
from physarum.actors.mirror.asking import versions_url
from physarum.actors.mirror.versions import model_files
from physarum.actors.weights_area import weights_area
from physarum.agents.calculator.model import build
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.connection import Bus
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.canary import Canary, Trial
from physarum.weightsync.manifest import Manifest, manifest_digest
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.copying import Copying
from physarum.weightsync.publisher import upload
from physarum.weightsync.snapshot import Snapshot

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@contextlib.asynccontextmanager
async def announced(bus: Bus, publisher: Publisher, service: Service) -> AsyncIterator[None]:
    """A checkpoint actor that says where it is."""

    async def beat() -> None:
        for sequence in itertools.count(1):
            facts = {"url": service.url}
            beat = Heartbeat(
                role="checkpoint", instance="checkpoint-0", state="ready", pid=1, host="h", started_at=1.0,
                sequence=sequence, facts=facts,
            )  # fmt: skip
            await announce(bus, publisher, beat)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


async def until(condition: Callable[[], bool], limit_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.02)


async def publish(
    made: EngineActor, engine: LiveEngine, service: Service, session: aiohttp.ClientSession, seed: int
) -> str:
    """The weights of `seed` as the next head."""
    version = Version.parse(engine.next_label())
    snapshot = Snapshot.take(engine.reference(seed).state_dict().items())
    manifest = await upload(snapshot, version, service.url, TOKEN, 30.0, session=session, model_digest="m", step=1)
    head = states.Head(
        label=str(version), epoch=version.epoch, number=version.number, manifest=manifest_digest(manifest),
        total_bytes=manifest.total_bytes, published_at=0.0,
    )  # fmt: skip
    await Register(made.bus, made.publisher, "weights", states.Head).put(head, states.HEAD, "policy")
    return str(version)


async def test_one_that_comes_back_during_a_trial_serves_what_passed_at_once(
    tmp_path: Path, bus: Bus, publisher: Publisher, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the verdict with the weights that it was started with."""
    monkeypatch.setenv("WEIGHTS_TOKEN", TOKEN)
    options = [
        f"engines.policy.url=[{engine.url},{engine.url}]", "checkpoint.token_env=WEIGHTS_TOKEN",
        f"engines.policy.canary.gate={__file__}:passes", "engines.policy.update_share=1",
    ]  # fmt: skip
    context = make_context(tmp_path, bus, publisher, "engine", *options, instance="policy-0")
    context.folder.path.mkdir(exist_ok=True)
    context.folder.start_model.symlink_to(engine.weights(0), target_is_directory=True)
    made = EngineActor(context)
    register, key = Register(bus, publisher, "weights", Trial), (states.CANARY, "policy", "policy")
    other = Canary(register, key, "policy-1", 1, 60.0)
    control = EngineControl(engine.url, session := aiohttp.ClientSession())
    async with (
        session,
        running_service(tmp_path / "service") as service,
        announced(bus, publisher, service),
        running(made),
    ):
        first = await publish(made, engine, service, session, seed=2)
        await until(lambda: made.state == "ready" and made.facts.get("version") == first)
        next_label = str(Version("policy", 1, Version.parse(first).number + 1))
        assert await other.admitted(next_label)
        second = await publish(made, engine, service, session, seed=0)
        assert second == next_label
        serving = Register(bus, publisher, "weights", states.Serving)
        await register_until(serving, lambda one: one.state == "verified", states.ENGINE, "policy", "policy-0")
        await control.set_version_label("start")  # its owner starts it anew
        await until(lambda: made.numbers["updates"] == 2 and made.state == "ready")
        assert made.facts["version"] == await control.live_label() == first
        await other.vote(second, None)
        await until(lambda: made.facts.get("version") == second)
    SharedArea.remove_of_run(weights_area(context.folder, context.config, only_look=True).folder)
    SharedArea.remove_of_run(context.folder.path)


async def test_one_that_reaches_the_store_alone_follows_what_is_mirrored(
    tmp_path: Path, bus: Bus, publisher: Publisher, engine: LiveEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """No service is there; a version that is not the one the head names is not taken."""
    options = [
        f"engines.policy.url=[{engine.url}]", "engines.policy.weights_from=mirror",
        f"checkpoint.versions.mirror=file://{tmp_path}/bucket",
    ]  # fmt: skip
    context = make_context(tmp_path, bus, publisher, "engine", *options, instance="policy-0")
    context.folder.path.mkdir(exist_ok=True)
    context.folder.start_model.symlink_to(engine.weights(0), target_is_directory=True)
    made, url = EngineActor(context), versions_url(context.config)
    assert url is not None
    heads = Register(bus, publisher, "weights", states.Head)
    async with running(made):
        manifest = mirrored(url, engine, seed=2)
        head = states.Head(
            label=manifest.label, epoch=1, number=manifest.version.number, manifest="0" * 32,
            total_bytes=manifest.total_bytes, published_at=0.0,
        )  # fmt: skip
        await heads.put(head, states.MIRRORED, "policy")
        await until(lambda: "the bus names 00000000" in caplog.text)
        assert "version" not in made.facts
        await heads.put(msgspec.structs.replace(head, manifest=manifest_digest(manifest)), states.MIRRORED, "policy")
        await until(lambda: made.facts.get("version") == manifest.label and made.state == "ready")
    SharedArea.remove_of_run(context.folder.path)


def mirrored(url: str, engine: LiveEngine, seed: int) -> Manifest:
    """The weights of `seed` as the next version in an object store."""
    version = Version.parse(engine.next_label())
    snapshot = Snapshot.take(engine.reference(seed).state_dict().items())
    entries, chunks = snapshot.entries("xxh3")
    manifest = Manifest(
        version=version, parent=None, model_digest="m", tensors=entries, total_bytes=snapshot.total_bytes, step=1,
        created=0.0,
    )  # fmt: skip
    Copying(Bucket(url), lambda: None, None).copy(manifest, chunks.__getitem__, model_files(engine.weights(seed)))
    snapshot.close()
    return manifest


async def passes(probe: Probe) -> None:
    """A gate that asks nothing."""


@pytest.mark.parametrize(
    "shared", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["same-host", "shared-folder"]
)
async def test_it_is_attached_updated_and_left_running(
    tmp_path: Path, bus: Bus, publisher: Publisher, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setenv("WEIGHTS_TOKEN", TOKEN)
    options = [f"engines.policy.url=[{engine.url}]", "checkpoint.token_env=WEIGHTS_TOKEN", "supervisor.heartbeat_s=0.2"]
    if shared:
        options.append(f"engines.policy.weights_folder={tmp_path / 'shared'}")
    context = make_context(tmp_path, bus, publisher, "engine", *options, instance="policy-0")
    context.folder.path.mkdir(exist_ok=True)
    context.folder.start_model.symlink_to(engine.weights(0), target_is_directory=True)
    made = EngineActor(context)
    control = EngineControl(engine.url, session := aiohttp.ClientSession())
    async with session, running_service(tmp_path / "service") as service, announced(bus, publisher, service):
        async with running(made):
            first = await publish(made, engine, service, session, seed=2)
            await until(lambda: made.state == "ready" and made.facts["version"] == first)
            assert await control.live_label() == first and made.facts["engine_pid"] is None

            # Its owner starts it anew, with the weights that it had before.
            await control.set_version_label("start")
            await until(lambda: made.numbers["updates"] == 2 and made.state == "ready")
            assert await control.live_label() == first
            second = await publish(made, engine, service, session, seed=0)
            await until(lambda: made.facts.get("version") == second)
        assert await control.live_label() == second, "detached, it goes on serving"
        async with session.post(
            f"{engine.url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
        ) as answer:
            assert spans(await answer.json()) == [(second, 0, 4)]
    serving = await Register(bus, publisher, "weights", states.Serving).entries(states.ENGINE, "policy")
    assert [(one.engine, one.label, one.state) for one in serving] == [("policy-0", second, "live")]
    SharedArea.remove_of_run(weights_area(context.folder, context.config, only_look=True).folder)
    SharedArea.remove_of_run(context.folder.path)


async def serving(tmp_path: Path, bus: Bus, publisher: Publisher, url: str, model: Path) -> EngineActor:
    options = [f"engines.judge.url=[{url}]", f"engines.judge.model={model}", "supervisor.heartbeat_s=0.2"]
    return EngineActor(make_context(tmp_path, bus, publisher, "engine", *options, instance="judge-0"))


async def test_a_frozen_model_at_a_url_is_the_one_that_is_named(
    tmp_path: Path, bus: Bus, publisher: Publisher, engine: LiveEngine
) -> None:
    """It was taken for whatever the configuration said, and judged."""
    same = tmp_path / "same"
    shutil.copytree(engine.model, same)
    made = await serving(tmp_path, bus, publisher, engine.url, same)
    async with running(made):
        await until(lambda: made.state == "ready")
        assert made.facts["version"] == "frozen" and made.facts["model"]


@contextlib.asynccontextmanager
async def elsewhere(architectures: list[str], tokens: list[int] | None, folder: str = "/nosuch") -> AsyncIterator[str]:
    """A server that was started from `folder`."""

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": folder, "architectures": architectures})

    async def cut(request: web.Request) -> web.Response:
        assert (await request.json())["add_special_tokens"] is False
        return web.Response(status=404) if tokens is None else web.json_response({"tokens": tokens})

    app = web.Application()
    app.router.add_get("/model_info", info)
    app.router.add_post("/tokenize", cut)
    async with TestServer(app) as http:
        yield str(http.make_url("")).rstrip("/")


async def test_from_another_host_its_kind_and_its_tokenizer_are_compared(
    tmp_path: Path, bus: Bus, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    build(tmp_path / "judge", seed=0, hidden=32, layers=1, intermediate=64)
    kind = json.loads((tmp_path / "judge" / "config.json").read_text())["architectures"]
    context = (await serving(tmp_path, bus, publisher, "http://h", tmp_path / "judge")).context
    right = FolderTokenizer(tmp_path / "judge").encode(PROBE)

    async def joined(architectures: list[str], tokens: list[int] | None) -> str:
        async with elsewhere(architectures, tokens) as url, aiohttp.ClientSession() as session:
            return await check_attached(context, "judge", tmp_path / "judge", EngineControl(url, session))

    with pytest.raises(UnrecoverableError, match=r"serves OtherForCausalLM \(of /nosuch\); expected"):
        await joined(["OtherForCausalLM"], right)
    with pytest.raises(UnrecoverableError, match=r"the tokenizer of http://.* cuts a text into 2 tokens \[1, 2\]"):
        await joined(kind, [1, 2])
    assert await joined(kind, right) == await joined(kind, None)
    assert "are not compared: POST http" in caplog.text


async def test_a_frozen_model_at_a_url_with_other_weights_is_refused(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    for name, seed in (("judge", 0), ("other", 1)):
        build(tmp_path / name, seed=seed, hidden=32, layers=1, intermediate=64)
    kind = json.loads((tmp_path / "judge" / "config.json").read_text())["architectures"]
    context = (await serving(tmp_path, bus, publisher, "http://h", tmp_path / "judge")).context
    async with elsewhere(kind, None, str(tmp_path / "other")) as url, aiohttp.ClientSession() as session:
        with pytest.raises(UnrecoverableError, match=r"is not the model that http://.* serves: .* model.safetensors"):
            await check_attached(context, "judge", tmp_path / "judge", EngineControl(url, session))
