"""The commands on weight versions: what is there, who serves it, what changed, whether it is whole, what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from actor_fixture import BASE
from checkpoint_service import TOKEN, publish, running_service, tensors
from safetensors.torch import save_file

from physarum.actors import states
from physarum.actors.checkpoint.pins import pinned
from physarum.actors.context import Context, Identity, RunFolder
from physarum.actors.mirror.asking import versions_url
from physarum.actors.tools import weights
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import CheckpointBadError, NotInRunError, RunUnfitError
from physarum.actors.weights_area import weights_area
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.weightsync.area import SharedArea
from physarum.weightsync.catalogue import manifests_in
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.mirror.bucket import Bucket
from physarum.weightsync.mirror.copying import Copying
from physarum.weightsync.mirror.record import read_record
from physarum.weightsync.service_client import CheckpointClient

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


@pytest_asyncio.fixture
async def run(tmp_path: Path, bus: Bus, publisher: Publisher) -> AsyncIterator[OpenRun]:
    """A run with a start model and no process."""
    (tmp_path / "recipe.yaml").write_text(BASE)
    folder = RunFolder(tmp_path / bus.run)
    folder.start_model.mkdir(parents=True)
    save_file(tensors(0), folder.start_model / "model.safetensors")
    yield OpenRun(folder, resolve(tmp_path / "recipe.yaml"), bus, publisher, live=False)
    SharedArea.remove_of_run(folder.path)


async def published(run: OpenRun, numbers: range, keep_last: int | None = None) -> None:
    """By the run's own area; the first tensor changes. Pins are asked for as the checkpoint actor does."""
    area = weights_area(run.folder, run.config)
    context = Context(Identity(run.bus.run, "checkpoint", "checkpoint-0"), run.config, run.folder, run.bus.endpoint, run.bus, run.publisher)  # noqa: E501  # fmt: skip
    async with (
        running_service(run.folder.weights, keep_last, -1.0, area, pinned=lambda: pinned(context)) as service,
        aiohttp.ClientSession() as session,
    ):
        for number in numbers:
            await publish(service, CheckpointClient(service.url, TOKEN, session), number, tensors(number, 1), area=area)


async def test_altered_bytes_in_the_object_store_are_named(run: OpenRun, tmp_path: Path) -> None:
    with pytest.raises(RunUnfitError, match="has no mirror of versions"):
        await weights.verified_in_mirror(run, None)
    settings = parse_command_line([f"checkpoint.versions.mirror=file://{tmp_path}/bucket"])
    run = dataclasses.replace(run, config=resolve(tmp_path / "recipe.yaml", settings))
    url = versions_url(run.config)
    assert url is not None and await weights.verified_in_mirror(run, None) == []
    await published(run, range(1, 3))
    area, bucket = weights_area(run.folder, run.config), Bucket(url)
    for manifest in manifests_in(run.folder.weights / "manifests"):
        with HeldFile.open(area, manifest.label) as file:  # type: ignore[union-attr]
            places = file.places(manifest)
            held = {digest: bytes(file.slice(*place)) for digest, place in places.items()}
        Copying(bucket, lambda: None, None).copy(manifest, held.__getitem__, {})
    found = await weights.verified_in_mirror(run, None)
    assert [(one.label, one.fault) for one in found] == [("policy@1.1", ""), ("policy@1.2", "")]
    [stored] = read_record(bucket, Version("policy", 1, 2), None).objects
    bucket.put(stored.key, bytes(stored.size))
    found = await weights.verified_in_mirror(run, None)
    assert found[0].fault == "" and "remove it there" in found[1].fault
    with pytest.raises(CheckpointBadError, match=stored.key):
        weights.refuse_faulty(found)
    assert [one.label for one in await weights.verified_in_mirror(run, "policy@1.1")] == ["policy@1.1"]
    with pytest.raises(NotInRunError, match=r"there are: policy@1.1, policy@1.2"):
        await weights.verified_in_mirror(run, "policy@1.9")


async def test_versions_head_engines_and_differences_are_shown(run: OpenRun) -> None:
    await published(run, range(1, 4))
    head = states.Head(label="policy@1.3", epoch=1, number=3, manifest="", total_bytes=0, published_at=0.0)
    await Register(run.bus, run.publisher, "weights", states.Head).put(head, states.HEAD, "policy")
    serving = states.Serving(engine="policy-0", label="policy@1.2", state="refused", reason="no room", at=1.0)
    await Register(run.bus, run.publisher, "weights", states.Serving).put(serving, states.ENGINE, "policy", "policy-0")
    view = await weights.view(run)
    assert view.head == "policy@1.3" and view.engines == [serving]
    assert [(one.label, one.step, one.where) for one in view.versions] == [
        (f"policy@1.{number}", number, "memory") for number in (1, 2, 3)
    ]
    found = await weights.difference(run, "policy@1.1", "policy@1.3")
    assert (found.tensors, found.changed_tensors, found.changed_bytes, found.names) == (4, 1, 256, ["a"])
    assert found.changed_elements == pytest.approx(0.25)


async def test_an_altered_byte_is_named_and_the_others_are_whole(run: OpenRun) -> None:
    await published(run, range(1, 3))
    with weights_area(run.folder, run.config).path("policy@1.2").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    found = await weights.verified(run, None)
    assert [(one.label, bool(one.fault)) for one in found] == [("policy@1.1", False), ("policy@1.2", True)]
    with pytest.raises(CheckpointBadError, match=r"policy@1\.2, tensor d: .* altered"):
        weights.refuse_faulty(found)
    with pytest.raises(NotInRunError, match=r"no version policy@9\.9; there are: policy@1\.1, policy@1\.2"):
        await weights.verified(run, "policy@9.9")


async def test_a_pinned_version_stays_and_goes_once_it_is_let_go(run: OpenRun) -> None:
    await published(run, range(1, 2))
    assert await weights.pin(run, "policy@1.1", True) == ["policy@1.1"]
    await published(run, range(2, 5), keep_last=1)
    assert [(one.label, one.pinned) for one in (await weights.view(run)).versions] == [
        ("policy@1.1", True),
        ("policy@1.4", False),
    ]
    assert await weights.pin(run, "policy@1.1", False) == []
    await published(run, range(5, 6), keep_last=1)
    assert [one.label for one in (await weights.view(run)).versions] == ["policy@1.5"]


async def test_looking_at_a_run_that_has_ended_makes_no_memory(run: OpenRun) -> None:
    await published(run, range(1, 2))
    SharedArea.remove_of_run(run.folder.path)
    assert [one.where for one in (await weights.view(run)).versions] == ["gone"]
    assert [one.fault is not None for one in await weights.verified(run, "policy@1.1")] == [True]
    assert not weights_area(run.folder, run.config, only_look=True).folder.exists()
