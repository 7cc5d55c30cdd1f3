"""The run's folder before anything starts: its configuration is written once and never silently changed."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.errors import RunDiffersError, RunFinishedError
from physarum.bus.endpoint import Endpoint
from physarum.configs.errors import ConfigError
from physarum.configs.loader import digest, dump, resolve
from physarum.configs.origin import display_path
from physarum.configs.root import RootConfig


def refuse_unusable(folder: RunFolder, config: RootConfig) -> None:
    """Raises RunDiffersError (made by another configuration) or RunFinishedError; a new or interrupted run is fine."""
    if not folder.config.is_file():
        return
    if (fault := _difference(folder.config, config)) is not None:
        raise RunDiffersError(
            f"{display_path(folder.path)} was made by another configuration ({fault}); a run keeps the one it started"
            f" with. Use another name (`run.name=NAME`), or remove the folder to start over"
        )
    if folder.summary.is_file():
        raise RunFinishedError(
            f"run {folder.path.name} is finished: {display_path(folder.summary)}. Nothing was started."
            " To train again use another name (`run.name=NAME`), or remove the folder"
        )


def prepare(folder: RunFolder, config: RootConfig) -> None:
    """Makes the folder and records the resolved configuration; an interrupted run of the same one is continued."""
    for path in (folder.path, folder.bus, folder.logs, folder.actors):
        path.mkdir(parents=True, exist_ok=True)
    if not folder.config.is_file():
        write_atomic(folder.config, dump(config).encode())


def write_endpoint(folder: RunFolder, endpoint: Endpoint) -> None:
    """Where the actors find the bus; names of variables, never secrets."""
    write_atomic(folder.endpoint, msgspec.json.encode(endpoint))


def write_atomic(path: Path, data: bytes) -> None:
    """All or nothing, also for a reader in between."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_bytes(data)
    os.replace(aside, path)


def _difference(recorded: Path, config: RootConfig) -> str | None:
    """The first sections in which the recorded configuration differs, in words; None when it is the same."""
    try:
        old = resolve(recorded)
    except ConfigError as error:
        return f"which this version cannot read: {error.problems[0]}"
    if digest(old) == digest(config):
        return None
    before, after = old.model_dump(mode="json"), config.model_dump(mode="json")
    return "different: " + ", ".join(sorted(_changes("", before, after))[:4])


def _changes(prefix: str, before: object, after: object) -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        return [found for key in keys for found in _changes(f"{prefix}.{key}", before.get(key), after.get(key))]
    return [] if before == after else [f"`{prefix.lstrip('.')}`"]
