"""From a checkpoint to a Hugging Face folder, as it was trained or quantised.

Invariant: the folder appears whole or not at all; the run is only read. The checkpoint is loaded as the trainer loads it, by
a world of the run's own shape, so it needs the memory and the devices that training has.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError, RunUnfitError
from physarum.actors.tools.saved import durables
from physarum.configs.root import RootConfig
from physarum.weightsync.errors import WeightSyncError
from physarum.weightsync.layout import forms_in
from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.presets import preset
from physarum.weightsync.quantisation.reading import folder_tensors

START: Final = "start"


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written; `quantised`: the quant_method, "" for none."""

    folder: str
    checkpoint: str
    quantised: str
    tensors: int
    size_bytes: int


async def export_hf(run: OpenRun, folder: Path, checkpoint: str | None, quant: str | None) -> Exported:
    """Writes `checkpoint` (None: the newest on disk; START: the start model) into `folder`, which must not exist.

    Raises NotInRunError, RunUnfitError, UnrecoverableError for a checkpoint that is altered.
    """
    if await asyncio.to_thread(folder.exists):
        raise RunUnfitError(f"{folder} exists; expected a new folder: choose another name, or remove it")
    quantisation = None if quant is None else preset(quant)
    name, digest = (START, "") if checkpoint == START else await _chosen(run, checkpoint)
    aside = folder.with_name(f".{folder.name}-writing")
    try:
        await asyncio.to_thread(_write, run.folder, run.config, name, digest, aside, quantisation)
        await asyncio.to_thread(os.replace, aside, folder)
    finally:
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
    forms = await asyncio.to_thread(forms_in, folder)
    return Exported(
        folder=str(folder),
        checkpoint=name,
        quantised="" if quantisation is None else quantisation.options["quant_method"],
        tensors=len(forms),
        size_bytes=sum(form.size_bytes for form in forms.values()),
    )


async def _chosen(run: OpenRun, checkpoint: str | None) -> tuple[str, str]:
    """Name and digest of a checkpoint on disk. Raises NotInRunError naming those that are there."""
    there = {one.folder: one.digest for one in await durables(run) if (run.folder.checkpoints / one.folder).is_dir()}
    name = checkpoint or next(reversed(there), None)
    if name is None or name not in there:
        found = "no checkpoint" if checkpoint is None else f"no checkpoint {checkpoint}"
        raise NotInRunError(f"run {run.name} has {found}; on disk are: {', '.join([START, *there])}")
    return name, there[name]


def _write(
    folder: RunFolder, config: RootConfig, name: str, digest: str, aside: Path, quantisation: Quantisation | None
) -> None:
    """In one thread: a world belongs to the one that started it."""
    from physarum.actors.trainer.errors import TrainerError

    shutil.rmtree(aside, ignore_errors=True)
    try:
        if name == START:
            _write_start(folder.start_model.resolve(), aside, quantisation)
        else:
            _write_trained(folder, config, name, digest, aside, quantisation)
    except (TrainerError, WeightSyncError) as error:
        raise RunUnfitError(f"{name} of {folder.path.name} was not exported: {error}") from error


def _write_start(start: Path, aside: Path, quantisation: Quantisation | None) -> None:
    from physarum.actors.trainer.hf_folder import write_hf_folder

    if Quantisation.in_folder(start) is not None:
        raise RunUnfitError(f"the start model {start} is quantised already; copy it, or export a checkpoint")
    write_hf_folder(start, aside, folder_tensors(start), quantisation)


def _write_trained(
    folder: RunFolder, config: RootConfig, name: str, digest: str, aside: Path, quantisation: Quantisation | None
) -> None:
    from physarum.actors.trainer.checkpoints import Checkpoints
    from physarum.actors.trainer.settings import world_config
    from physarum.actors.trainer.world import World

    state, _ = Checkpoints(folder.checkpoints).load(name, digest)
    world = World.start(world_config(config, folder.start_model.resolve()))
    try:
        world.load(state)
        world.save_hf(aside, quantisation)
    finally:
        world.close()
