"""A run's weight versions: which there are, which engine serves what, what changed between two, and whether bytes are whole.

Everything is read on the host of the checkpoint service: manifests from the run's folder, bytes from its memory or its chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Final, Literal

import msgspec
import numpy as np

from physarum.actors import states
from physarum.actors.context import RunFolder
from physarum.actors.mirror.asking import versions_url
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import CheckpointBadError, NotInRunError, RunUnfitError
from physarum.actors.weights_area import weights_area
from physarum.bus.errors import WrongSequenceError
from physarum.bus.register import Register
from physarum.bus.version import Version
from physarum.configs.secrets import read_secret
from physarum.weightsync.area import SharedArea
from physarum.weightsync.catalogue import manifests_in
from physarum.weightsync.chunks import ChunkStore
from physarum.weightsync.errors import BucketError, BucketUnfitError, ChunkAlteredError, ChunkMissingError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.mirror.apart import BucketApart
from physarum.weightsync.mirror.reading import Mirror, read_object
from physarum.weightsync.mirror.record import Attached, Stored, versions_in
from physarum.weightsync.staging import verify_tensors

_TRIES: Final = 20


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One version. `where`: its bytes are in the host's memory, on disk as chunks, or gone. `fault`: what `verify` found."""

    label: str
    step: int
    total_bytes: int
    created: float
    where: Literal["memory", "disk", "gone"]
    pinned: bool
    fault: str | None = None


class Mirrored(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the object store. `fault`: what `verify` found there, "" for nothing."""

    label: str
    fault: str


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What `weights ls` shows. `head`: the label of the newest published version; `mirrored`: of the newest one in
    `checkpoint.versions.mirror`."""

    head: str | None
    mirrored: str | None = None
    versions: list[Published]
    engines: list[states.Serving]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Between two versions. `changed_elements`: of 1, None where the bytes of one of them are not in memory here."""

    tensors: int
    changed_tensors: int
    changed_bytes: int
    total_bytes: int
    changed_elements: float | None
    names: list[str]


class _Bytes:
    """Where the bytes of a run's versions are."""

    def __init__(self, run: OpenRun) -> None:
        self.area: SharedArea = weights_area(run.folder, run.config, only_look=True)
        self.store = ChunkStore(run.folder.weights / "chunks", only_look=True)

    def where(self, manifest: Manifest) -> Literal["memory", "disk", "gone"]:
        if self.area.path(manifest.label).is_file():
            return "memory"
        return "disk" if all(self.store.has(digest) for digest in manifest.sizes()) else "gone"

    def fault(self, manifest: Manifest) -> str | None:
        """None: nothing could be read, "": whole, else what is wrong. Reads every byte."""
        try:
            file = HeldFile.open(self.area, manifest.label)
            if file is None:
                for digest in manifest.sizes():
                    self.store.read(digest)
                return ""
            with file:
                verify_tensors(file, manifest, manifest.tensors)
            return ""
        except (ChunkAlteredError, ChunkMissingError) as error:
            return str(error)


async def view(run: OpenRun) -> View:
    """The policy's newest head, its versions, oldest first, and every engine that serves it."""
    model = run.config.model.name
    head = (await _heads(run).get(states.HEAD, model)).value
    mirrored = (await _heads(run).get(states.MIRRORED, model)).value
    pinned = await pins(run)
    engines = await Register(run.bus, run.publisher, "weights", states.Serving).entries(states.ENGINE, model)
    places = await asyncio.to_thread(_Bytes, run)
    found = await asyncio.to_thread(manifests_in, run.folder.weights / "manifests")
    several = bool(run.config.policies)
    versions = [_published(one, places, pinned) for one in found if not several or one.version.model == model]
    return View(
        head=head.label if head else None,
        mirrored=mirrored.label if mirrored else None,
        versions=versions,
        engines=sorted(engines, key=lambda one: one.engine),
    )


async def verified(run: OpenRun, label: str | None) -> list[Published]:
    """Reads the versions that are here (or the one named) byte by byte. Raises NotInRunError."""
    manifests = _chosen(run.folder, label)
    places, pinned = await asyncio.to_thread(_Bytes, run), await pins(run.of_label(label))
    found = []
    for manifest in manifests:
        one = _published(manifest, places, pinned)
        if one.where != "gone" or label is not None:
            fault = await asyncio.to_thread(places.fault, manifest)
            found.append(msgspec.structs.replace(one, fault=fault))
    return found


async def verified_in_mirror(run: OpenRun, label: str | None) -> list[Mirrored]:
    """Reads the versions in the object store (or the one named) byte by byte. Raises NotInRunError, RunUnfitError, and
    CheckpointBadError where the store does not answer."""
    versions, url = run.config.checkpoint.versions, versions_url(run.config)
    if versions is None or url is None:
        raise RunUnfitError(
            f"run {run.name} has no mirror of versions; its configuration would name one (checkpoint.versions)"
        )
    with closing(BucketApart(url, versions.timeout_s)) as bucket:
        try:
            return await asyncio.to_thread(_in_mirror, Mirror(bucket, read_secret(versions.key_env)), label)
        except BucketError as error:
            raise CheckpointBadError(str(error)) from error


def _in_mirror(mirror: Mirror, label: str | None) -> list[Mirrored]:
    there = [str(version) for version in versions_in(mirror.objects)]
    if label is not None and label not in there:
        raise NotInRunError(f"{mirror.url} has no version {label}; there are: {', '.join(there) or 'none'}")
    return [
        Mirrored(label=one, fault=_fault_there(mirror, Version.parse(one))) for one in there if label in (None, one)
    ]


def _fault_there(mirror: Mirror, version: Version) -> str:
    """What is missing or altered of it there; "" for nothing."""
    try:
        record = mirror.record(version)
        named: list[Stored | Attached] = [*record.objects, *record.files]
        for one in named:
            read_object(mirror.objects, one)
    except (BucketUnfitError, ChunkAlteredError) as error:
        return str(error)
    return ""


def refuse_faulty(found: Sequence[Published | Mirrored]) -> None:
    """Raises CheckpointBadError naming every fault."""
    faults = [one.fault for one in found if one.fault]
    if faults:
        raise CheckpointBadError("; ".join(faults))


async def difference(run: OpenRun, before: str, after: str) -> Difference:
    """Raises NotInRunError."""
    [old], [new] = _chosen(run.folder, before), _chosen(run.folder, after)
    known = {tensor.name: tensor for tensor in old.tensors}
    changed = [tensor for tensor in new.tensors if known.get(tensor.name) != tensor]
    places = await asyncio.to_thread(_Bytes, run)
    share = await asyncio.to_thread(_changed_elements, places.area, old, new, changed)
    return Difference(
        tensors=len(new.tensors),
        changed_tensors=len(changed),
        changed_bytes=sum(tensor.size_bytes for tensor in changed),
        total_bytes=new.total_bytes,
        changed_elements=share,
        names=[tensor.name for tensor in changed],
    )


async def pins(run: OpenRun) -> list[str]:
    """Labels that the checkpoint service keeps."""
    entry = await Register(run.bus, run.publisher, "weights", states.Pins).get(states.PINS, run.config.model.name)
    return entry.value.labels if entry.value else []


async def pin(run: OpenRun, label: str, wanted: bool) -> list[str]:
    """Keeps a version, or lets it go; the labels of its policy that are kept then. Raises NotInRunError."""
    run = run.of_label(label)
    if wanted:
        _chosen(run.folder, label)
    register = Register(run.bus, run.publisher, "weights", states.Pins)
    for _ in range(_TRIES):
        entry = await register.get(states.PINS, run.config.model.name)
        labels = [one for one in (entry.value.labels if entry.value else []) if one != label] + [label] * wanted
        with suppress(WrongSequenceError):
            await register.compare_and_set(states.Pins(labels), entry.revision, states.PINS, run.config.model.name)
            return labels
    raise WrongSequenceError(f"{_TRIES} others changed the pins of {run.name} at the same time; repeat the command")


def _heads(run: OpenRun) -> Register[states.Head]:
    return Register(run.bus, run.publisher, "weights", states.Head)


def _published(manifest: Manifest, places: _Bytes, pinned: list[str]) -> Published:
    return Published(
        label=manifest.label,
        step=manifest.step,
        total_bytes=manifest.total_bytes,
        created=manifest.created,
        where=places.where(manifest),
        pinned=manifest.label in pinned,
    )


def _chosen(folder: RunFolder, label: str | None) -> list[Manifest]:
    found = manifests_in(folder.weights / "manifests")
    chosen = [manifest for manifest in found if label in (None, manifest.label)]
    if label is not None and not chosen:
        there = ", ".join(manifest.label for manifest in found) or "none"
        raise NotInRunError(f"run {folder.path.name} has no version {label}; there are: {there}")
    return chosen


def _changed_elements(area: SharedArea, old: Manifest, new: Manifest, changed: list[TensorEntry]) -> float | None:
    with suppress(FileNotFoundError):
        before, after = HeldFile.open(area, old.label), HeldFile.open(area, new.label)
        if before is None or after is None:
            return None
        with before, after:
            differ = sum(_differing(before, after, tensor) for tensor in changed if tensor.name in before.forms)
        return differ / max(new.total_bytes, 1)
    return None


def _differing(before: HeldFile, after: HeldFile, tensor: TensorEntry) -> int:
    """Bytes of the elements that are not the same bits."""
    width = tensor.size_bytes // max(int(np.prod(tensor.shape)), 1)
    one, other = (_elements(file.tensor(tensor.name), width) for file in (before, after))
    return width * (int((one != other).any(axis=1).sum()) if one.shape == other.shape else len(other))


def _elements(data: memoryview, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8).reshape(-1, max(width, 1))


def of_tensor_names(names: list[str], limit: int) -> Iterator[str]:
    """The first `limit` names, and how many more there are."""
    yield from names[:limit]
    if len(names) > limit:
        yield f"... and {len(names) - limit} more"
