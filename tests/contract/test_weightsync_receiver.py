"""The receiver against an engine that fails at every possible moment: the old weights, the new ones, or quarantine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from checkpoint_service import TOKEN, Service, publish, running_service, tensors
from safetensors.torch import load_file

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import (
    ChunkAlteredError,
    ChunkMissingError,
    EngineQuarantineError,
    ManifestError,
    ServiceUnreachableError,
    StaleVersionError,
    UpdateRefusedError,
)
from physarum.weightsync.layout import FILE_NAME, Form
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging
from physarum.weightsync.target import PauseMode

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


class BrokenEngineError(Exception):
    """What the stub raises where it is told to fail."""


class StubEngine:
    """Loads the tensors it is given into its own; `fails_at` names the call that raises, `lies` makes it keep its old label."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.loads: list[list[str]] = []
        self.label = "policy@1.0"
        self.fails_at: set[str] = set()
        self.lies = False
        self.hold: asyncio.Event | None = None

    async def check_pause_mode(self, mode: PauseMode) -> None:
        if "check" in self.fails_at:
            raise BrokenEngineError("check broke")

    async def pause(self, mode: PauseMode) -> None:
        self._called("pause")

    async def update_from_disk(self, folder: Path, label: str, mode: PauseMode) -> None:
        self._called("update")
        if self.hold is not None:
            await self.hold.wait()
        self.loads.append(sorted(load_file(folder / FILE_NAME)))
        self.weights |= {name: tensor.clone() for name, tensor in load_file(folder / FILE_NAME).items()}
        if not self.lies:
            self.label = label

    async def live_label(self) -> str:
        if "gone" in self.fails_at:
            raise BrokenEngineError("nobody answers")
        if self.calls[-1:] == ["update"]:
            self._called("label")
        return self.label

    async def continue_generation(self) -> None:
        self._called("continue")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails_at:
            raise BrokenEngineError(f"{name} broke")


class Rig:
    """One service, one stub engine and its receiver."""

    def __init__(self, service: Service, session: aiohttp.ClientSession, area: SharedArea) -> None:
        self.service = service
        self.client = CheckpointClient(service.url, TOKEN, session)
        self.engine = StubEngine()
        self.area = area
        self.staging = Staging(area, "engine-0")
        self.receiver = Receiver(
            self.engine, self.staging, session, live=Version("policy", 1, 0), model_digest="m", chunk_timeout_s=2.0
        )

    async def publish_and_apply(self, number: int, named: dict[str, torch.Tensor], epoch: int = 1) -> int:
        """Bytes that had to be fetched."""
        manifest = await publish(self.service, self.client, number, named, epoch)
        record = await self.receiver.apply(manifest, [self.service.url], TOKEN)
        assert record.version == manifest.version and record.pause_s >= 0 and record.fetch_s > 0
        assert record.bytes_fetched + record.bytes_reused == manifest.total_bytes
        return record.bytes_fetched

    def staged(self) -> list[str]:
        """What is left of staging and fetching."""
        places = ("engines", "filling")
        return sorted(file.name for place in places for file in (self.area.folder / place).rglob("[!.]*.*"))


def alter(area: SharedArea, label: str, count: int) -> None:
    """The last `count` bytes of a version become zeros."""
    with area.path(label).open("r+b") as file:
        file.seek(-count, 2)
        file.write(b"\0" * count)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_service(tmp_path / "service") as service, aiohttp.ClientSession() as session:
        yield Rig(service, session, SharedArea(tmp_path / "area"))


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


async def test_order_of_an_update_and_what_the_engine_holds_after(rig: Rig) -> None:
    await rig.publish_and_apply(1, tensors(1))
    assert rig.engine.calls == ["pause", "update", "label", "continue"]
    assert same(rig.engine.weights, tensors(1)) and rig.staged() == [] and rig.area.labels() == ["policy@1.1"]
    assert rig.receiver.live == Version("policy", 1, 1)


async def test_an_engine_that_repacks_what_it_loads_gets_every_tensor(rig: Rig) -> None:
    rig.receiver = Receiver(rig.engine, rig.staging, rig.receiver._session, live=Version("policy", 1, 0), whole=True)
    await rig.publish_and_apply(1, tensors(1, changed=1))
    await rig.publish_and_apply(2, tensors(2, changed=1))
    assert rig.engine.loads == [sorted(tensors(1))] * 2


async def test_only_what_changed_is_fetched_and_applied_and_old_versions_go(rig: Rig) -> None:
    assert await rig.publish_and_apply(1, tensors(1, changed=1)) == 4 * 256
    assert await rig.publish_and_apply(2, tensors(2, changed=1)) == 256
    assert await rig.publish_and_apply(3, tensors(3, changed=1)) == 256
    assert same(rig.engine.weights, tensors(3, changed=1)) and rig.engine.loads == [["a", "b", "c", "d"], ["a"], ["a"]]
    assert sorted(rig.area.labels()) == ["policy@1.2", "policy@1.3"]


async def test_an_engine_that_was_started_anew_gets_every_tensor(rig: Rig) -> None:
    await rig.publish_and_apply(1, tensors(1, changed=1))
    rig.engine.weights = {}
    rig.receiver.engine_restarted(None)
    assert await rig.publish_and_apply(2, tensors(2, changed=1)) == 256
    assert same(rig.engine.weights, tensors(2, changed=1))


async def test_an_engine_that_others_started_anew_is_not_given_a_part(rig: Rig) -> None:
    """The change alone on top of its start weights would be a mixture under the new label."""
    await rig.publish_and_apply(1, tensors(1, changed=1))
    rig.engine.label, rig.engine.weights = "start", {}
    manifest = await publish(rig.service, rig.client, 2, tensors(2, changed=1))
    with pytest.raises(
        UpdateRefusedError, match=r"serves 'start', expected 'policy@1\.1'.*gets all of policy@1\.2 next"
    ):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.calls[-2:] == ["pause", "continue"] and rig.engine.weights == {}
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert same(rig.engine.weights, tensors(2, changed=1))


async def test_an_engine_that_does_not_answer_is_not_quarantined(rig: Rig) -> None:
    await rig.publish_and_apply(1, tensors(1))
    rig.engine.fails_at = {"gone", "pause", "continue"}
    manifest = await publish(rig.service, rig.client, 2, tensors(2))
    with pytest.raises(UpdateRefusedError, match="nobody answers"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.receiver.quarantined is None
    rig.engine.fails_at = set()
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert same(rig.engine.weights, tensors(2))


async def test_an_engine_of_unknown_weights_that_cannot_pause_is_not_told_to_go_on(rig: Rig) -> None:
    """It may be paused in the middle of the update of an actor that was killed."""
    rig.receiver.engine_restarted(None)
    rig.engine.fails_at = {"pause"}
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    with pytest.raises(UpdateRefusedError, match="could not be paused"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.calls == ["pause"]


async def test_a_version_that_goes_while_it_is_verified_is_applied_from_the_open_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))

    def verify_then_lose(*arguments: object) -> None:
        verify(*arguments)  # type: ignore[arg-type]
        rig.area.give_up(manifest.label)

    monkeypatch.setattr("physarum.weightsync.staging.verify", verify_then_lose)
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert same(rig.engine.weights, tensors(1)) and rig.area.labels() == []


async def test_what_a_killed_receiver_was_fetching_is_cleared_away(rig: Rig) -> None:
    rig.area.begin("fetch-policy@1.1").close()
    alive = rig.area.begin("fetch-policy@1.7")
    await rig.publish_and_apply(2, tensors(2))
    assert sorted(file.name for file in (rig.area.folder / "filling").glob("fetch-*")) == ["fetch-policy@1.7"]
    alive.discard()


async def test_reused_bytes_that_were_altered_in_memory_are_fetched_again(rig: Rig) -> None:
    await rig.publish_and_apply(1, tensors(1, changed=1))
    alter(rig.area, "policy@1.1", 4 * 256)
    assert await rig.publish_and_apply(2, tensors(2, changed=1)) == 4 * 256
    assert same(rig.engine.weights, tensors(2, changed=1))


async def test_what_is_altered_in_the_memory_of_the_host_never_reaches_the_engine(rig: Rig) -> None:
    """Two engines of a host: what one has fetched is the other's, too, but each verifies it."""
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    other = StubEngine()
    beside = Receiver(other, Staging(rig.area, "engine-1"), rig.client.session, live=Version("policy", 1, 0))
    alter(rig.area, "policy@1.1", 1)
    with pytest.raises(ChunkAlteredError, match=r"policy@1\.1, tensor d"):
        await beside.apply(manifest, [rig.service.url], TOKEN)
    assert other.calls == [] and beside.checksum_failures == 1
    assert (await beside.apply(manifest, [rig.service.url], TOKEN)).bytes_fetched == manifest.total_bytes
    assert same(other.weights, tensors(1))


async def test_engines_of_one_host_fetch_a_version_once(rig: Rig) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    engines = [StubEngine() for _ in range(4)]
    receivers = [
        Receiver(engine, Staging(rig.area, f"engine-{number}"), rig.client.session, live=Version("policy", 1, 0))
        for number, engine in enumerate(engines, 1)
    ]
    records = await asyncio.gather(*(one.apply(manifest, [rig.service.url], TOKEN) for one in receivers))
    assert sorted(record.bytes_fetched for record in records) == [0, 0, 0, manifest.total_bytes]
    assert rig.service.sent("GET /v1/chunks") == len(manifest.sizes())
    assert all(same(engine.weights, tensors(1)) for engine in engines)


async def test_one_that_gives_up_waiting_for_a_fetch_keeps_nobody_from_it(rig: Rig) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    holder = rig.area.alone(manifest.label)
    waiting = asyncio.create_task(rig.receiver.apply(manifest, [rig.service.url], TOKEN))
    await asyncio.sleep(0)
    while not waiting.done() and rig.service.sent("GET /v1/chunks") == 0 and not rig.receiver.updating:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    os.close(holder)
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert same(rig.engine.weights, tensors(1))


@pytest.mark.parametrize("when", ["waiting", "preparing"])
async def test_an_engine_that_was_started_anew_does_not_wait_for_its_turn(rig: Rig, when: str) -> None:
    """What was prepared is only what changed, of weights that it has not any more."""
    await rig.publish_and_apply(1, tensors(1))
    waits = asyncio.Event()

    @asynccontextmanager
    async def turn(label: str) -> AsyncIterator[None]:
        waits.set()
        await asyncio.Event().wait()
        yield

    def on_state(label: str, state: str) -> None:
        if when == "preparing" and state == "verified":
            rig.receiver.engine_restarted(None)

    rig.receiver._turn, rig.receiver._on_state = turn, on_state
    manifest = await publish(rig.service, rig.client, 2, tensors(2, changed=1))
    applying = asyncio.create_task(rig.receiver.apply(manifest, [rig.service.url], TOKEN))
    if when == "waiting":
        await waits.wait()
        assert not rig.receiver.touching
        rig.receiver.engine_restarted(None)
    with pytest.raises(UpdateRefusedError, match=r"started anew before it got policy@1\.2"):
        await applying
    assert rig.engine.loads == [["a", "b", "c", "d"]]
    rig.receiver._turn = lambda label: nullcontext()
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.loads[1:] == [["a", "b", "c", "d"]] and same(rig.engine.weights, tensors(2, changed=1))


async def test_versions_that_are_not_newer_are_refused_before_anything(rig: Rig) -> None:
    await rig.publish_and_apply(1, tensors(1), epoch=2)
    calls = len(rig.engine.calls)
    known = rig.service.catalogue.get("policy@2.1")
    assert known is not None
    for version in (Version("policy", 1, 9), Version("policy", 2, 0), Version("policy", 2, 1)):
        older = type(known)(**{**{name: getattr(known, name) for name in known.__struct_fields__}, "version": version})
        with pytest.raises(StaleVersionError, match=rf"{version} is not newer than policy@2\.1"):
            await rig.receiver.apply(older, [rig.service.url], TOKEN)
    assert len(rig.engine.calls) == calls


async def test_altered_chunk_never_reaches_the_engine(rig: Rig) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    sizes = manifest.sizes()
    victim = list(sizes)[3]

    def lie(request: web.Request) -> web.StreamResponse | None:
        return web.Response(body=b"\0" * sizes[victim]) if request.path.endswith(victim) else None

    rig.service.before = lie
    with pytest.raises(ChunkAlteredError, match=f"expected {victim}"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.calls == [] and rig.staged() == [] and rig.receiver.checksum_failures == 1
    rig.service.before = lambda request: None
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert same(rig.engine.weights, tensors(1))


async def test_next_source_is_asked_when_one_lies_lacks_or_is_down(rig: Rig, tmp_path: Path) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    async with running_service(tmp_path / "liar") as liar, running_service(tmp_path / "empty") as empty:
        liar.before = lambda request: web.Response(body=b"\1" * 128)
        record = await rig.receiver.apply(manifest, [liar.url, empty.url, "http://127.0.0.1:9", rig.service.url], TOKEN)
    assert record.bytes_fetched == manifest.total_bytes and rig.receiver.checksum_failures == 8
    assert same(rig.engine.weights, tensors(1))


async def test_vanished_version_and_dead_service_are_told_apart(rig: Rig) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    rig.service.store.delete(next(iter(manifest.sizes())))
    with pytest.raises(ChunkMissingError, match="does not hold chunk"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    with pytest.raises(ServiceUnreachableError):
        await rig.receiver.apply(manifest, ["http://127.0.0.1:9"], TOKEN)
    with pytest.raises(ChunkMissingError, match="has no source"):
        await rig.receiver.apply(manifest, [], TOKEN)
    assert rig.engine.calls == [] and rig.staged() == []


async def test_other_model_is_refused_before_anything(rig: Rig) -> None:
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    session, staging = rig.client.session, rig.staging
    other = Receiver(rig.engine, staging, session, model_digest="another")
    with pytest.raises(ManifestError, match="model with digest m, the engine serves another"):
        await other.apply(manifest, [rig.service.url], TOKEN)
    narrow = Receiver(rig.engine, staging, session, expected={"a": Form("float32", (8, 8))})
    with pytest.raises(ManifestError, match="3 are unknown"):
        await narrow.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.calls == []


async def test_engine_that_cannot_be_updated_safely_is_left_alone(rig: Rig) -> None:
    rig.engine.fails_at = {"check"}
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    with pytest.raises(UpdateRefusedError, match=r"cannot be updated to policy@1\.1: check broke"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.calls == [] and rig.receiver.quarantined is None


async def test_engine_that_cannot_pause_goes_on_as_before(rig: Rig) -> None:
    rig.engine.fails_at = {"pause"}
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    with pytest.raises(UpdateRefusedError, match="goes on as before: pause broke"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.engine.calls == ["pause", "continue"] and rig.receiver.quarantined is None
    assert rig.receiver.live == Version("policy", 1, 0)
    rig.engine.fails_at = set()
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)


@pytest.mark.parametrize("moment", ["update", "label", "continue"])
async def test_failure_after_the_pause_is_quarantine_until_a_restart(rig: Rig, moment: str) -> None:
    rig.engine.fails_at = {moment}
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    with pytest.raises(EngineQuarantineError, match=f"weights are not known: {moment} broke"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert ("continue" in rig.engine.calls) == (moment == "continue")
    rig.engine.fails_at = set()
    with pytest.raises(EngineQuarantineError, match="start it anew first"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    rig.receiver.engine_restarted(Version("policy", 1, 0))
    await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert same(rig.engine.weights, tensors(1))


async def test_engine_that_names_another_version_is_quarantined(rig: Rig) -> None:
    rig.engine.lies = True
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    with pytest.raises(EngineQuarantineError, match=r"serves 'policy@1\.0', expected 'policy@1\.1'"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert "continue" not in rig.engine.calls


async def test_neither_pause_nor_continue_is_quarantine(rig: Rig) -> None:
    rig.engine.fails_at = {"pause", "continue"}
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    with pytest.raises(EngineQuarantineError, match="neither paused"):
        await rig.receiver.apply(manifest, [rig.service.url], TOKEN)
    assert rig.receiver.quarantined is not None


async def test_cancelling_during_the_swap_quarantines(rig: Rig) -> None:
    rig.engine.hold = asyncio.Event()
    manifest = await publish(rig.service, rig.client, 1, tensors(1))
    task = asyncio.create_task(rig.receiver.apply(manifest, [rig.service.url], TOKEN))
    while "update" not in rig.engine.calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.receiver.quarantined is not None


async def test_two_updates_at_once_are_applied_one_after_the_other(rig: Rig) -> None:
    first = await publish(rig.service, rig.client, 1, tensors(1))
    second = await publish(rig.service, rig.client, 2, tensors(2))
    await asyncio.gather(*(rig.receiver.apply(manifest, [rig.service.url], TOKEN) for manifest in (first, second)))
    assert rig.engine.calls == ["pause", "update", "label", "continue"] * 2
    assert same(rig.engine.weights, tensors(2))


async def test_a_receiver_lets_go_of_every_version_that_it_has_replaced(rig: Rig) -> None:
    """A descriptor that stays open keeps the memory of a whole version, though nothing names it any more."""
    for number in (1, 2, 3, 4, 5, 6):
        await rig.publish_and_apply(number, tensors(number))
    links = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)]
    gone = [link for link in links if str(rig.area.folder) in link and link.endswith("(deleted)")]
    assert gone == []


def _is_open(descriptor: str) -> bool:
    """The one by which /proc is listed is not."""
    return os.path.islink(f"/proc/self/fd/{descriptor}")
