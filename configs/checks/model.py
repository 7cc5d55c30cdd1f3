"""Model folders hold what the trainer and the engines will read; where another run makes the model, that run is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from physarum.configs.checks.imports import check_hooks
from physarum.configs.errors import ConfigError, HubError, Problem, Severity
from physarum.configs.loader import resolve
from physarum.configs.origin import KeyPath, display_path
from physarum.configs.root import RootConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def check_model(config: RootConfig) -> Iterator[Problem]:
    """The start model of each policy, as far as it can be known without a download."""
    for view in config.views():
        yield from _model(view)


def _model(config: RootConfig) -> Iterator[Problem]:
    model, under = config.model, config.under
    if model.path is not None:
        yield from _folder(config, (*under, "model", "path"), model.path)
    if model.hub is not None and model.hub.offline:
        from physarum.configs.model_source import fetch_hub  # the hub's library, only where a hub is asked

        try:
            yield from _folder(config, (*under, "model", "hub"), fetch_hub(model.hub, None))
        except HubError as error:
            where = config.origins.where((*under, "model", "hub"))
            yield Problem(Severity.ERROR, where, str(error), "the snapshot in the cache", "see the message")
    if model.made_by is not None:
        yield from _made_by(config)
    start = config.trainer.optimizer_start
    if start is not None and not (start.folder / "metadata.json").is_file():
        where = config.origins.where((*under, "trainer", "optimizer_start", "folder"))
        shown = display_path(start.folder)
        remedy = "name an iter_* folder of Megatron-core's torch_dist format, or remove the key"
        yield Problem(Severity.ERROR, where, f"no metadata.json in {shown}", "a torch_dist folder", remedy)


def check_engines(config: RootConfig) -> Iterator[Problem]:
    """Interpreters and models of the engine groups that are started here."""
    for name, engine in config.engines.items():
        if engine.python is not None and not os.access(engine.python, os.X_OK):
            where = config.origins.where(("engines", name, "python"))
            found = f"no executable {display_path(engine.python)}"
            yield Problem(Severity.ERROR, where, found, "a Python interpreter", "correct the path, or remove the key")
        if engine.model is not None and engine.url is None:
            yield from _folder(config, ("engines", name, "model"), engine.model)
        if engine.quantised_model is not None:
            yield from _quantised(config, ("engines", name, "quantised_model"), engine.quantised_model)


def _quantised(config: RootConfig, key: KeyPath, folder: Path) -> Iterator[Problem]:
    faults = list(_folder(config, key, folder))
    yield from faults
    match _json(folder / "config.json"):
        case {"quantization_config": dict()} | {"compression_config": dict()}:
            return
    if not faults:
        where, shown = config.origins.where(key), display_path(folder)
        remedy = "export it quantised (actorctl checkpoints export-hf --quant), or remove the key"
        yield Problem(Severity.ERROR, where, f"no quantization_config in {shown}", "a quantised model", remedy)


def _folder(config: RootConfig, key: KeyPath, folder: Path) -> Iterator[Problem]:
    for found, expected, remedy in _folder_faults(folder):
        yield Problem(Severity.ERROR, config.origins.where(key), found, expected, remedy)


def _folder_faults(folder: Path) -> Iterator[tuple[str, str, str]]:
    """What a Hugging Face folder lacks, as (found, expected, remedy)."""
    shown = display_path(folder)
    if not folder.is_dir():
        yield f"no folder {shown}", "a Hugging Face model folder", "correct the path, or put the model there"
        return
    if not (folder / "config.json").is_file():
        yield f"no config.json in {shown}", "the model's configuration", "export the model with save_pretrained"
    elif not isinstance(_json(folder / "config.json"), dict):
        yield f"a broken config.json in {shown}", "a JSON object", "export the model again"
    if missing := _missing_weights(folder):
        yield f"no {missing} in {shown}", "all weights", "export or copy the model again"
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"no tokenizer in {shown}", f"one of {', '.join(_TOKENIZER_FILES)}", "save the tokenizer there too"


def _missing_weights(folder: Path) -> str:
    """The weight files that are missing, in words; empty when all are there."""
    if any((folder / name).is_file() for name in _SINGLE_WEIGHTS):
        return ""
    for name in _INDEXES:
        match _json(folder / name):
            case {"weight_map": dict() as shards}:
                absent = sorted({str(shard) for shard in shards.values() if not (folder / str(shard)).is_file()})
                return ", ".join(absent)
    return " or ".join((*_SINGLE_WEIGHTS, *_INDEXES))


def _json(path: Path) -> object:
    """The file's data, or None when it is missing or broken."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _made_by(config: RootConfig) -> Iterator[Problem]:
    """Resolves the chain of configurations whose runs make the model, and checks each one's hooks and own model."""
    where = config.origins.where((*config.under, "model", "made_by"))
    maker, seen = config.model.made_by, list[Path]()
    while maker is not None:
        if maker in seen:
            chain = " -> ".join(display_path(path) for path in (*seen, maker))
            yield Problem(Severity.ERROR, where, f"a cycle: {chain}", "a chain that ends", "drop one `made_by`")
            return
        seen.append(maker)
        try:
            made = resolve(maker)
        except ConfigError as error:
            yield from error.problems
            return
        yield from check_hooks(made)
        if made.machines:
            found, expected = (
                f"`machines` in {display_path(maker)}",
                "a run on one machine: nobody starts the others of it",
            )
            yield Problem(
                Severity.ERROR, where, found, expected, "make the model by a run of its own, and set `model.path`"
            )
        if made.model.path is not None:
            yield from _folder(made, ("model", "path"), made.model.path)
        maker = made.model.made_by
