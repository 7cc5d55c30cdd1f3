"""The whole way of a version, from a trainer's tensors to an engine that answers with them, while requests run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from checkpoint_service import TOKEN, Service, running_service
from engine_fixture import LiveEngine, engine_python, serve
from engine_requests import PROMPT, Streams, generate, spans, worst

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.delivery import transport_for
from physarum.bus.version import Version
from physarum.configs.engine import EngineConfig
from physarum.weightsync.area import SharedArea
from physarum.weightsync.errors import ChunkAlteredError, EngineQuarantineError
from physarum.weightsync.layout import forms_in
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.publisher import upload
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.snapshot import Snapshot
from physarum.weightsync.staging import Staging

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]

REQUESTS = 20
TOLERANCE = 1e-3
ROUNDS = 10
LONG = 400
"""Tokens of requests that must still run when a version has arrived."""


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running_service(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(params=["disk", "ipc"])
async def receiver(
    engine: LiveEngine, session: aiohttp.ClientSession, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Receiver]:
    """Of the engine, which serves seed 0; once for each transport."""
    control = EngineControl(engine.url, session)
    live = Version.parse(await serve(engine, control, seed=0))
    expected = forms_in(engine.weights(0))
    staging = Staging(SharedArea(tmp_path / "area"), "engine-0")
    settings = EngineConfig(transport=request.param)
    transport = await transport_for(settings, control, staging, engine_python(), tmp_path / "agent.log", "engine-0")
    made = Receiver(control, staging, session, live=live, expected=expected, transport=transport)
    yield made
    await made.close()


async def publish(engine: LiveEngine, service: Service, session: aiohttp.ClientSession, seed: int) -> Manifest:
    snapshot = Snapshot.take(engine.reference(seed).state_dict().items())
    version = Version.parse(engine.next_label())
    return await upload(snapshot, version, service.url, TOKEN, 30.0, session=session, model_digest="tiny", step=1)


async def test_a_trainers_tensors_reach_the_engine_while_it_generates(
    engine: LiveEngine, service: Service, session: aiohttp.ClientSession, receiver: Receiver
) -> None:
    old = str(receiver.live)
    sampling = {"max_new_tokens": LONG, "temperature": 1.0, "ignore_eos": True}
    streams = Streams(engine, range(REQUESTS), sampling_params=sampling)
    await streams.begun()
    manifest = await publish(engine, service, session, seed=2)
    record = await receiver.apply(manifest, [service.url], TOKEN)
    after = await generate(engine, 50, tokens=8)
    assert record.bytes_fetched == sum(manifest.sizes().values()) and record.version == manifest.version
    assert spans(after) == [(manifest.label, 0, 8)]
    assert worst(engine, 50, after, 0, 8, seed=2) < TOLERANCE
    answers = await streams.answers()
    assert any(len(spans(answer)) == 2 for answer in answers)
    for number, answer in enumerate(answers):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert [span[0] for span in spans(answer)] in ([old, manifest.label], [old])
        assert spans(answer)[-1][2] == LONG
        for (_, start, end), seed in zip(spans(answer), (0, 2), strict=False):
            assert worst(engine, number, answer, start, end, seed) < TOLERANCE


async def test_an_altered_chunk_leaves_the_engine_as_it_was(
    engine: LiveEngine, service: Service, session: aiohttp.ClientSession, receiver: Receiver
) -> None:
    manifest = await publish(engine, service, session, seed=2)
    sizes = manifest.sizes()
    victim = max(sizes, key=lambda digest: sizes[digest])

    def alter(request: web.Request) -> web.StreamResponse | None:
        return web.Response(body=b"\0" * sizes[victim]) if request.path.endswith(victim) else None

    service.before = alter
    before = str(receiver.live)
    with pytest.raises(ChunkAlteredError):
        await receiver.apply(manifest, [service.url], TOKEN)
    answer = await generate(engine, 3, tokens=8)
    assert spans(answer) == [(before, 0, 8)]
    assert worst(engine, 3, answer, 0, 8, seed=0) < TOLERANCE


async def test_unchanged_weights_move_no_bytes_and_every_round_is_exact(
    engine: LiveEngine, service: Service, session: aiohttp.ClientSession, receiver: Receiver
) -> None:
    await receiver.apply(await publish(engine, service, session, seed=2), [service.url], TOKEN)
    for _ in range(ROUNDS):
        manifest = await publish(engine, service, session, seed=2)
        record = await receiver.apply(manifest, [service.url], TOKEN)
        assert record.bytes_fetched == 0
        answer = await generate(engine, 7, tokens=4)
        assert spans(answer) == [(manifest.label, 0, 4)] and answer["meta_info"]["cached_tokens"] < PROMPT
        assert worst(engine, 7, answer, 0, 4, seed=2) < TOLERANCE


async def test_an_engine_that_dies_during_the_update_is_quarantined(
    engine: LiveEngine, service: Service, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The control reaches the engine until the pause, and nobody after it."""
    manifest = await publish(engine, service, session, seed=2)
    control = EngineControl(engine.url, session)
    pause = control.pause

    async def pause_then_lose(mode: str) -> None:
        await pause("retract")
        control.base_url = "http://127.0.0.1:9"

    control.pause = pause_then_lose  # type: ignore[method-assign, assignment]
    lost = Receiver(control, Staging(SharedArea(tmp_path / "area"), "engine-0"), session)
    with pytest.raises(EngineQuarantineError, match="weights are not known"):
        await lost.apply(manifest, [service.url], TOKEN)
    await EngineControl(engine.url, session).continue_generation()
