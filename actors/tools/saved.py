"""A run's checkpoints: what the ledger says of them, what is on disk, and whether that is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.errors import UnrecoverableError
from physarum.actors.policies import TRAINER, trainer_instance
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import CheckpointBadError, NotInRunError, RunUnfitError
from physarum.actors.trainer.checkpoints import Checkpoints
from physarum.bus import control, ledger
from physarum.bus.errors import BusRefusedError
from physarum.bus.ledger import DurableRecord

_TORCH_DIST: Final = "metadata.json"
"""Only a folder in that form has it; reading it would load torch."""
_MARGIN_S: Final = 60.0
"""Beyond one step: writing the state."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. `on_disk` False: it was let go (checkpoint.keep_last). `form`: as `trainer.checkpoint_format` has it, ""
    when it is gone. `mirrored`: it is whole in `checkpoint.mirror`; null: nobody looked there. `fault`: what `verify` found, ""
    for nothing."""

    name: str
    epoch: int
    number: int
    digest: str
    floor: int
    last_plan: int
    on_disk: bool
    size_bytes: int
    form: str
    mirrored: bool | None = None
    fault: str | None = None


async def listed(run: OpenRun) -> list[Saved]:
    """Every checkpoint that the ledger names, oldest first; one that was written again counts once."""
    folder = run.folder.checkpoints
    latest = {one.folder: one for one in await durables(run)}
    return [await asyncio.to_thread(_saved, folder / name, record) for name, record in latest.items()]


async def durables(run: OpenRun) -> list[DurableRecord]:
    """The ledger's records of checkpoints, in order."""
    found = [
        item.record for item in await ledger.read(run.bus, key=run.ledger) if isinstance(item.record, DurableRecord)
    ]
    return list(dict.fromkeys(found))  # a fork may have one in several places


async def verified(run: OpenRun, name: str | None) -> list[Saved]:
    """Reads the checkpoints that are on disk (or the one named) byte by byte. Raises NotInRunError.

    The trainer may let one go while it is read: that is no fault.
    """
    found = [one for one in await listed(run) if one.on_disk or one.name == name]
    chosen = [one for one in found if name in (None, one.name)]
    if name is not None and not chosen:
        there = ", ".join(one.name for one in found) or "none"
        raise NotInRunError(f"run {run.name} has no checkpoint {name}; on disk are: {there}")
    return [await asyncio.to_thread(_verified, run.folder, one) for one in chosen]


async def chosen(run: OpenRun, name: str) -> Path:
    """The folder of a checkpoint, by its name (1.20) or its version's label (policy@1.20), every byte compared.

    Raises NotInRunError, CheckpointBadError.
    """
    run = run.of_label(name)
    (found,) = await verified(run, name.rpartition("@")[2])
    refuse_faulty([found])
    if not found.on_disk:
        raise NotInRunError(
            f"checkpoint {found.name} of run {run.name} was let go; keep more (checkpoint.keep_last), or bring it back from a"
            " mirror (actorctl checkpoints restore)"
        )
    return run.folder.checkpoints / found.name


def refuse_faulty(found: list[Saved]) -> None:
    """Raises CheckpointBadError naming every fault."""
    faults = [one.fault for one in found if one.fault]
    if faults:
        raise CheckpointBadError("; ".join(faults))


async def save_now(run: OpenRun) -> dict[str, Any]:
    """Has the trainer make its present state durable after the step that it is in: folder, number, digest.

    Raises RunUnfitError when there is no trainer at work, BusUnreachableError when it does not answer in time.
    """
    limit_s = run.config.trainer.step_timeout_s + _MARGIN_S
    try:
        answer = await control.call(run.bus, TRAINER, trainer_instance(run.config.policy), "checkpoint", {}, limit_s)
    except BusRefusedError as error:
        raise RunUnfitError(
            f"run {run.name} has no trainer at work, so there is no state to save that is not saved already; start it with"
            " actorctl up"
        ) from error
    if "error" in answer:
        raise RunUnfitError(f"run {run.name}: no checkpoint was saved: {answer['error']}")
    return answer


def _saved(folder: Path, record: DurableRecord) -> Saved:
    there = folder.is_dir()
    return Saved(
        name=record.folder,
        epoch=record.epoch,
        number=record.number,
        digest=record.digest,
        floor=record.floor,
        last_plan=record.last_plan,
        on_disk=there,
        size_bytes=sum(file.stat().st_size for file in folder.iterdir()) if there else 0,
        form=("torch_dist" if (folder / _TORCH_DIST).is_file() else "ranks") if there else "",
    )


def _verified(folder: RunFolder, saved: Saved) -> Saved:
    try:
        Checkpoints(folder.checkpoints).load(saved.name, saved.digest)
    except UnrecoverableError as error:
        gone = not (folder.checkpoints / saved.name).is_dir() and saved.on_disk
        return msgspec.structs.replace(saved, fault="" if gone else str(error), on_disk=not gone)
    return msgspec.structs.replace(saved, fault="")
