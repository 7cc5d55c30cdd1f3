"""From a checkpoint to a Hugging Face folder, as it was trained or quantised.

Invariant: the folder appears whole or not at all; the run is only read. Files of ranks are loaded by a world of the run's own
shape, which needs the memory and the devices that training has; torch_dist by one rank.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.tools import saved
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError, RunUnfitError
from physarum.actors.tools.new_folder import new_folder
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
    quantisation, run = None if quant is None else preset(quant), run.of_label(checkpoint)
    state = None if checkpoint == START else await saved.chosen(run, checkpoint or await _newest(run))
    await asyncio.to_thread(_write, run, state, folder, quantisation)
    forms = await asyncio.to_thread(forms_in, folder)
    return Exported(
        folder=str(folder),
        checkpoint=START if state is None else state.name,
        quantised="" if quantisation is None else quantisation.options["quant_method"],
        tensors=len(forms),
        size_bytes=sum(form.size_bytes for form in forms.values()),
    )


async def _newest(run: OpenRun) -> str:
    """The name of the newest checkpoint on disk. Raises NotInRunError."""
    there = [one.folder for one in await saved.durables(run) if (run.folder.checkpoints / one.folder).is_dir()]
    if not there:
        raise NotInRunError(f"run {run.name} has no checkpoint on disk; --checkpoint {START} takes its start model")
    return there[-1]


def _write(run: OpenRun, state: Path | None, folder: Path, quantisation: Quantisation | None) -> None:
    """In one thread: a world belongs to the one that started it."""
    from physarum.actors.trainer.errors import TrainerError

    start = run.folder.start_model.resolve()
    try:
        with new_folder(folder, RunUnfitError) as aside:
            if state is None:
                _write_start(start, aside, quantisation)
            else:
                write_trained(run.config, start, state, aside, quantisation)
    except (TrainerError, WeightSyncError) as error:
        raise RunUnfitError(f"{state or START} of run {run.name} was not exported: {error}") from error


def _write_start(start: Path, aside: Path, quantisation: Quantisation | None) -> None:
    from physarum.actors.trainer.hf_folder import write_hf_folder

    if Quantisation.in_folder(start) is not None:
        raise RunUnfitError(f"the start model {start} is quantised already; copy it, or export a checkpoint")
    write_hf_folder(start, aside, folder_tensors(start), quantisation)


def write_trained(
    config: RootConfig, start: Path, state: Path, out: Path, quantisation: Quantisation | None = None
) -> None:
    """The policy of a training state. Files of ranks need a world of the run's own shape, torch_dist one rank. Blocking.

    Raises TrainerError, QuantisationError.
    """
    from physarum.actors.trainer.megatron.torch_dist import is_torch_dist
    from physarum.actors.trainer.settings import world_config
    from physarum.actors.trainer.world import World
    from physarum.actors.trainer.world_config import WorldConfig

    settings, any_shape = world_config(config, start), is_torch_dist(state)
    alone = WorldConfig(hf_folder=settings.hf_folder, dtype=settings.dtype)
    world = World.start(alone if any_shape else settings)
    try:
        if any_shape:
            world.load_weights(state)
        else:
            world.load(state)
        world.save_hf(out, quantisation)
    finally:
        world.close()
