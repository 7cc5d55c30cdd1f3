"""The checkpoint actor copies each version to an object store once its head has moved; the real process, on a real bus."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import msgspec
import pytest
import torch
from actor_fixture import eventually, make_context, register_until, running
from checkpoint_service import tensors
from safetensors.torch import save_file

from physarum.actors import states
from physarum.actors.checkpoint.actor import CheckpointActor
from physarum.actors.checkpoint.mirroring import Mirroring
from physarum.actors.context import Context
from physarum.actors.mirror import asking
from physarum.actors.mirror.asking import ask, versions_url
from physarum.actors.mirror.errors import MirrorError, MirrorUnfitError
from physarum.actors.mirror.records import CopyVersion, VersionCopied
from physarum.actors.trainer.publication import _advance
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.version import Fork, Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.catalogue import Catalogue
from physarum.weightsync.manifest import Manifest, encode_manifest, manifest_digest
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.record import read_record, record_key, versions_in
from physarum.weightsync.publisher import upload
from physarum.weightsync.snapshot import Snapshot

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 30.0


class Run:
    """A trainer that publishes as the real one does, and a checkpoint actor."""

    def __init__(self, place: Path, bus: Bus, publisher: Publisher, *overrides: str) -> None:
        self.bucket = place / "bucket"
        self.context: Context = make_context(
            place, bus, publisher, "checkpoint", f"checkpoint.versions.mirror=file://{self.bucket}", *overrides
        )
        self.heads = Register(bus, publisher, "weights", states.Head)
        model = self.context.folder.start_model
        model.mkdir(parents=True)
        save_file(tensors(0), model / "model.safetensors")
        (model / "config.json").write_text("{}")
        (model / "tokenizer.json").write_text("[]")

    @property
    def url(self) -> str:
        found = versions_url(self.context.config)
        assert found is not None
        return found

    def there(self) -> list[str]:
        return [str(one) for one in versions_in(Bucket(self.url))]

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[CheckpointActor]:
        actor = CheckpointActor(self.context)
        async with running(actor):
            await eventually(lambda: "url" in actor.facts)
            yield actor

    async def publish(
        self, actor: CheckpointActor, number: int, epoch: int = 1, withdrawn: tuple[Fork, ...] = ()
    ) -> Manifest:
        version = Version("policy", epoch, number)
        snapshot = Snapshot.take(tensors(number, changed=1).items(), 128)
        async with aiohttp.ClientSession() as session:
            manifest = await upload(
                snapshot, version, actor.facts["url"], None, 5.0, session=session, model_digest="m", step=number
            )
        snapshot.close()
        await _advance(self.heads, self.head(manifest, withdrawn), "policy")
        return manifest

    def head(self, manifest: Manifest, withdrawn: tuple[Fork, ...] = ()) -> states.Head:
        return states.Head(
            label=manifest.label,
            epoch=manifest.version.epoch,
            number=manifest.version.number,
            manifest=manifest_digest(manifest),
            total_bytes=manifest.total_bytes,
            published_at=time.time(),
            withdrawn=withdrawn,
        )

    async def mirrored(self, label: str) -> states.Head:
        return await register_until(self.heads, lambda head: head.label == label, states.MIRRORED, "policy")


@pytest.fixture
def run(tmp_path: Path, bus: Bus, publisher: Publisher) -> Run:
    return Run(tmp_path, bus, publisher)


async def test_each_version_is_there_soon_after_its_head_moved_and_only_what_changed_is_sent(run: Run) -> None:
    async with run.serving() as actor:
        for number in (1, 2, 3):
            manifest = await run.publish(actor, number, withdrawn=(Fork(0, 7),))
            assert (await run.mirrored(manifest.label)).manifest == manifest_digest(manifest)
            record = read_record(Bucket(run.url), manifest.version, None)
            assert record.manifest == manifest and record.withdrawn == (Fork(0, 7),)
            assert [file.name for file in record.files] == ["config.json", "tokenizer.json"]
        await eventually(lambda: actor.numbers.get("versions_mirrored") == 3)
    assert run.there() == ["policy@1.2", "policy@1.3"]
    assert "version_mirror_failures" not in actor.numbers


async def test_with_every_the_versions_between_are_left_out_and_the_last_one_is_not(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    run = Run(tmp_path, bus, publisher, "checkpoint.versions.every=10", "checkpoint.versions.keep=9")
    async with run.serving() as actor:
        for number in (1, 2, 11, 12):
            manifest = await run.publish(actor, number)
            if number in (1, 11):
                await run.mirrored(manifest.label)
        await run.publish(actor, 12, epoch=2)  # a new trainer: also what it withdrew must be known there
        await run.mirrored("policy@2.12")
        await run.publish(actor, 13, epoch=2)
    assert run.there() == ["policy@1.1", "policy@1.11", "policy@2.12", "policy@2.13"]


async def test_a_store_that_refuses_is_counted_and_the_next_version_is_the_next_try(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.bucket.write_text("no folder")
    async with run.serving() as actor:
        await run.publish(actor, 1)
        await eventually(lambda: actor.numbers.get("version_mirror_failures") == 1)
        assert "policy@1.1 is not in file://" in caplog.text and "(failure 1)" in caplog.text
        run.bucket.unlink()
        await run.publish(actor, 2)
        await run.mirrored("policy@1.2")
    assert run.there() == ["policy@1.2"]


async def test_engines_hear_of_a_version_that_is_whole_there_although_older_ones_cannot_go(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """One record was damaged, or nothing may be removed: no version was announced any more, though each was copied."""
    async with run.serving() as actor:
        for number in (1, 2):
            manifest = await run.publish(actor, number)
            await run.mirrored(manifest.label)
        Bucket(run.url).put(record_key(manifest.version), b"damaged")
        await run.publish(actor, 3)
        await run.mirrored("policy@1.3")
        await eventually(lambda: actor.numbers.get("version_mirror_failures") == 1)
    assert "older versions could not go from file://" in caplog.text
    assert "policy@1.3" in run.there()


@pytest.mark.parametrize(("services", "failures"), [(1, 1), (2, None)])
async def test_what_another_service_took_is_no_failure_of_this_one(
    tmp_path: Path, bus: Bus, publisher: Publisher, services: int, failures: int | None
) -> None:
    run = Run(tmp_path, bus, publisher, f"checkpoint.count={services}")
    head = states.Head(label="policy@1.1", epoch=1, number=1, manifest="", total_bytes=0, published_at=0.0)
    await run.heads.put(head, states.HEAD, "policy")
    actor, nothing = (
        CheckpointActor(run.context),
        SimpleNamespace(get=lambda label: None, area=SharedArea(tmp_path / "a")),
    )
    await Mirroring(actor, cast(Catalogue, nothing))._bring()
    assert actor.numbers.get("version_mirror_failures") == failures


async def test_what_is_being_copied_is_not_let_go_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many versions are published meanwhile; then the newest is next."""
    began, go_on = asyncio.Event(), asyncio.Event()
    asked: list[str] = []

    async def slow(request: CopyVersion, expected: type, silence_s: float, setting: str) -> VersionCopied:
        asked.append(request.manifest.decode(errors="ignore"))
        if not began.is_set():
            began.set()
            await go_on.wait()
        return await ask(request, expected, silence_s, setting)

    monkeypatch.setattr("physarum.actors.checkpoint.mirroring.ask", slow)
    async with run.serving() as actor:
        await run.publish(actor, 1)
        await began.wait()
        for number in range(2, 8):  # more than checkpoint.keep_last
            await run.publish(actor, number)
        go_on.set()
        await run.mirrored("policy@1.7")
    assert run.there() == ["policy@1.1", "policy@1.7"]
    assert len(asked) == 2


DIES = """
import os, signal, sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from physarum.actors.mirror import process
from physarum.weightsync.mirror import bucket, copying

class Dying(LocalFileSystem):
    "A real disk; write number DIES_AT leaves half of its bytes there, and the process is no more."
    protocol = "file"
    left = int(sys.argv[1])
    def pipe_file(self, path, value, **options):
        Dying.left -= 1
        super().pipe_file(path, value[: len(value) // 2] if Dying.left < 0 else value)
        if Dying.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

bucket.LocalFileSystem = Dying
copying.Copying.__init__.__defaults__ = (1,)
fsspec.register_implementation("file", Dying, clobber=True)
process.main()
"""


@pytest.fixture
def request_here(tmp_path: Path) -> CopyVersion:
    """A version in this host's memory."""
    area = SharedArea(tmp_path / "area")
    version = Version("policy", 1, 1)
    snapshot = Snapshot.take({"a": torch.arange(600_000.0), "b": torch.ones(3)}.items(), 2 << 20, area, "trainer")
    entries, _ = snapshot.entries("xxh3")
    manifest = Manifest(
        version=version,
        parent=None,
        model_digest="m",
        tensors=entries,
        total_bytes=snapshot.total_bytes,
        step=1,
        created=1.0,
    )
    area.hold("trainer", manifest.label)
    snapshot.close()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return CopyVersion(
        url=f"file://{tmp_path}/bucket/weights",
        manifest=encode_manifest(manifest),
        area=str(area.folder),
        chunks=str(tmp_path / "chunks"),
        model=str(tmp_path / "model"),
        withdrawn=[],
        keep=2,
        key_env=None,
    )


@pytest.mark.parametrize("dies_at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (0, 2)), 1, 3])
async def test_killed_at_any_write_nothing_counts_and_the_next_copy_mends_it(
    request_here: CopyVersion, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """A chunk of 2 MiB, the pack of what is left, config.json, the record."""
    with monkeypatch.context() as patch:
        patch.setattr(asking, "COMMAND", (sys.executable, "-c", DIES, str(dies_at)))
        with pytest.raises(MirrorError, match="ended without an answer"):
            await ask(request_here, VersionCopied, LIMIT_S)
    bucket = Bucket(request_here.url)
    assert versions_in(bucket) == []
    copied = await ask(request_here, VersionCopied, LIMIT_S)
    assert copied.objects == 3 - dies_at  # what had been taken whole is not sent again
    assert [str(one) for one in versions_in(bucket)] == ["policy@1.1"]
    assert len(bucket.sizes("objects")) == 3  # and nothing of what was half written


async def test_a_version_whose_bytes_are_gone_is_told(request_here: CopyVersion) -> None:
    shutil.rmtree(request_here.area)
    with pytest.raises(MirrorError, match=r"chunk [0-9a-f]{32} is not in"):
        await ask(request_here, VersionCopied, LIMIT_S)
    with pytest.raises(MirrorUnfitError, match="no implementation of nowhere://"):
        await ask(msgspec.structs.replace(request_here, url="nowhere://b"), VersionCopied, LIMIT_S)
