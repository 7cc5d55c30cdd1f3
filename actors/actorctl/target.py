"""Which run a command is about: a NAME below the runs folder, or a CONFIG file that names one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.errors import NotRunningError
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_folder import has_begun, refuse_other_version
from physarum.actors.supervisor.run_lock import holder
from physarum.bus.endpoint import Endpoint
from physarum.configs.loader import resolve
from physarum.configs.origin import display_path
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig
from physarum.configs.run import AT

RUNS = Path("runs")


def find_part(target: str, root: Path, settings: Sequence[str] = ()) -> RunFolder:
    """As `find`; on a machine that is not the head its part of the run, by which others are reached over the bus."""
    folder = RunFolder(_path(target, root, settings))
    parts = [] if folder.config.is_file() else _parts(folder)
    return RunFolder(parts[0]) if parts else find(target, root, settings)


def find(target: str, root: Path, settings: Sequence[str] = ()) -> RunFolder:
    """The folder of an existing run. Raises NotRunningError when there is none, ConfigError for a broken CONFIG."""
    path = _path(target, root, settings)
    folder = RunFolder(path)
    if not folder.config.is_file() and (parts := _parts(folder)):
        raise NotRunningError(
            f"{display_path(parts[0])} is one machine's part of run {folder.run}, and this command needs the run's own folder;"
            " give it on the head"
        )
    if not folder.config.is_file():
        known = ", ".join(sorted(run.path.name for run in all_runs(root))) or "none"
        raise NotRunningError(
            f"no run {path.name!r} in {display_path(path.parent)}; there are: {known}. Give a run's name, its"
            " configuration, or --root"
        )
    if has_begun(folder):
        refuse_other_version(folder)
    return folder


def _path(target: str, root: Path, settings: Sequence[str]) -> Path:
    is_config = target.endswith((".yaml", ".yml")) or Path(target).is_file()
    return resolve(target, parse_command_line(settings)).run.folder if is_config else (root / target).absolute()


def _parts(folder: RunFolder) -> list[Path]:
    """Of the run, on this host, beside its own folder."""
    return sorted(path.parent for path in folder.path.parent.glob(f"{folder.path.name}{AT}*/config.yaml"))


def find_only(target: str | None, root: Path, settings: Sequence[str] = ()) -> RunFolder | None:
    """As `find`; without a target the one run that is live, or None. Raises NotRunningError when several are."""
    if target is not None:
        return find_part(target, root, settings)
    found = [run for run in all_runs(root) if is_live(run)]
    # Of a run of which the head is here, too, that one: its end is the end of all.
    heads = {run.run for run in found if AT not in run.path.name}
    live = [run for run in found if AT not in run.path.name or run.run not in heads]
    if len(live) > 1:
        listed = ", ".join(run.path.name for run in live)
        raise NotRunningError(f"several runs are live: {listed}; name one of them")
    return live[0] if live else None


def all_runs(root: Path) -> list[RunFolder]:
    return [RunFolder(path.parent.absolute()) for path in sorted(root.glob("*/config.yaml"))]


def is_live(folder: RunFolder) -> bool:
    """Whether a supervisor or an actor of the run is there on this host."""
    return holder(folder.path) is not None or any(record.alive for record in read_records(folder.actors))


def recorded_config(folder: RunFolder) -> RootConfig:
    """The configuration that the run was started with."""
    return resolve(folder.config)


def recorded_endpoint(folder: RunFolder) -> Endpoint:
    """Where the run's bus is (or was). Raises NotRunningError when the run never had one."""
    try:
        return msgspec.json.decode(folder.endpoint.read_bytes(), type=Endpoint)
    except FileNotFoundError:
        raise NotRunningError(f"run {folder.path.name} has never started its bus; start it with actorctl up") from None
