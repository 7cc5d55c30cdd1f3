"""Weights between Hugging Face folders and Megatron's torch_dist folders.

Invariant: a folder that is made appears whole or not at all, and never over another one. A world of one rank on this host
does the work, so a model must fit into its memory; what of a folder was not taken is said with the reason.

    DIR/latest_checkpointed_iteration.txt   "release", or the number of the newest iteration
    DIR/release/  DIR/iter_0000100/         .metadata, metadata.json, __R_N.distcp
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.tools.errors import ConversionError
from physarum.actors.tools.new_folder import new_folder
from physarum.actors.trainer.errors import TrainerError
from physarum.actors.trainer.megatron.torch_dist import Reader, is_torch_dist
from physarum.actors.trainer.world import World
from physarum.actors.trainer.world_config import WorldConfig

_LATEST: Final = "latest_checkpointed_iteration.txt"
_RELEASE: Final = "release"
_BESIDE: Final = (
    "a Hugging Face folder holds weights only: a run goes on with this optimizer where trainer.optimizer_start.folder names the"
    " folder, else with a fresh one"
)
_UNKNOWN: Final = "the model has no such weights"


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of a folder that were not taken, and why; `first` is the name of one of them."""

    part: str
    tensors: int
    first: str
    reason: str


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What was read and written."""

    source: str
    out: str
    left: list[Left] = []


def import_megatron(folder: Path, model: Path, out: Path) -> Converted:
    """Writes the weights of a torch_dist folder (or of the newest iteration below it) as a Hugging Face folder `out`.

    `model`: a Hugging Face folder of the same model, whose configuration and tokenizer it gets. Raises ConversionError.
    """
    source = iteration(folder)
    with (
        _world(WorldConfig(hf_folder=str(model), dtype=_dtype(model))) as world,
        new_folder(out, ConversionError) as aside,
    ):
        taken = world.load_weights(source)
        world.save_hf(aside)
    return Converted(source=str(source), out=str(out), left=_left(source, taken))


def import_hf(folder: Path, out: Path) -> Converted:
    """Writes a Hugging Face folder as `out`/release in torch_dist, as Megatron-LM and slime load it. Raises ConversionError."""
    with (
        _world(WorldConfig(hf_folder=str(folder), dtype=_dtype(folder))) as world,
        new_folder(out, ConversionError) as aside,
    ):
        world.save_weights(aside / _RELEASE)
        (aside / _LATEST).write_text(_RELEASE)
    return Converted(source=str(folder), out=str(out))


def iteration(folder: Path) -> Path:
    """`folder` itself if it is in torch_dist, else the one that it names as its newest. Raises ConversionError."""
    if is_torch_dist(folder):
        return folder
    try:
        named = (folder / _LATEST).read_text().strip()
        chosen = folder / (_RELEASE if named == _RELEASE else f"iter_{int(named):07d}")
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{folder} has neither metadata.json nor a readable {_LATEST} ({error}); expected a torch_dist folder, or one with"
            " iter_* folders below it: name one of those"
        ) from error
    if not is_torch_dist(chosen):
        raise ConversionError(
            f"{chosen}, which {folder / _LATEST} names, is not in torch_dist (its metadata.json says so); expected that format:"
            " choose another iteration, or convert it with Megatron-LM"
        )
    return chosen


def _left(source: Path, taken: set[str]) -> list[Left]:
    """Sorted into parts by the first words of their names."""
    parts: dict[tuple[str, str], list[str]] = {}
    for key in sorted(Reader(source).shapes().keys() - taken):
        is_optimizer = "optimizer." in key
        part = ("optimizer", _BESIDE) if is_optimizer else (key.split(".")[0], _UNKNOWN)
        parts.setdefault(part, []).append(key)
    return [Left(part=part, tensors=len(keys), first=keys[0], reason=reason) for (part, reason), keys in parts.items()]


def _dtype(folder: Path) -> str:
    """Of the weights that the folder's configuration names."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{folder}/config.json is unreadable ({error}); expected a Hugging Face folder"
        ) from error
    return "bfloat16" if found.get("dtype", found.get("torch_dtype")) in ("bfloat16", "float16") else "float32"


@contextmanager
def _world(config: WorldConfig) -> Iterator[World]:
    try:
        world = World.start(config)
        try:
            yield world
        finally:
            world.close()
    except TrainerError as error:
        raise ConversionError(str(error)) from error
