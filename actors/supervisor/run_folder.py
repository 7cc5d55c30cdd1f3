"""The run's folder before anything starts: its configuration is written once and never silently changed.

A run begins when its bus was reached (`bus/endpoint.json` is there): until then nothing depends on the configuration, so
one that was corrected after a failed start replaces it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.errors import RunDiffersError, RunFinishedError, RunUnfinishedError, VersionError
from physarum.bus.endpoint import Endpoint
from physarum.configs.errors import ConfigError
from physarum.configs.loader import digest, dump, resolve
from physarum.configs.origin import display_path
from physarum.configs.portable import differences
from physarum.configs.root import RootConfig

LAYOUT: Final = "2"
"""Raised with every change of the folder's layout, of a record's schema or of the streams that older code would misread."""


def refuse_unusable(folder: RunFolder, config: RootConfig) -> None:
    """A new or interrupted run is fine.

    Raises RunUnfinishedError, VersionError, RunDiffersError (made by another configuration) or RunFinishedError.
    """
    refuse_unfinished(folder)
    if not has_begun(folder):
        return
    refuse_other_version(folder)
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


def refuse_unfinished(folder: RunFolder) -> None:
    """Raises RunUnfinishedError."""
    if folder.unfinished.exists():
        raise RunUnfinishedError(
            f"{display_path(folder.path)} is not whole: the `actorctl {folder.unfinished.read_text() or 'command'}` that was"
            " making it was ended. Run that command again, which begins it anew"
        )


def has_begun(folder: RunFolder) -> bool:
    """Whether the run ever reached its bus."""
    return folder.config.is_file() and folder.endpoint.is_file()


def refuse_other_version(folder: RunFolder) -> None:
    """Raises VersionError for a folder whose files this version would misread."""
    try:
        found = folder.version.read_text().strip()
    except FileNotFoundError:
        found = ""
    if found != LAYOUT:
        named = f"layout version {found!r}" if found else "no layout version"
        raise VersionError(
            f"{display_path(folder.version)} names {named}; expected {LAYOUT!r}: another version of physarum made this run,"
            " and its store and checkpoints would be misread. Finish or export the run with the version that made it, or"
            " start a new one (`run.name=NAME`) from its model folder (`model.path`)"
        )


def prepare(folder: RunFolder, config: RootConfig, blobs: bool = True) -> None:
    """Makes the folder and records the resolved configuration; an interrupted run of the same one is continued. `blobs` False:
    this machine has no store of its own."""
    policies = [folder.of_policy(view.policy) for view in config.views()]
    for path in (folder.path, folder.bus, folder.logs, folder.actors, *(one.own for one in policies)):
        path.mkdir(parents=True, exist_ok=True)
    if not has_begun(folder):
        for stale in (stale for one in policies for stale in (one.start_model, one.start_model_record)):
            stale.unlink(missing_ok=True)
        write_atomic(folder.version, f"{LAYOUT}\n".encode())
        write_atomic(folder.config, dump(config).encode())
    if blobs:
        folder.blobs.identity()


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
    return "different: " + ", ".join(sorted(differences(before, after))[:4])
