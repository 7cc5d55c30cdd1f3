"""A run that begins with something in its streams: made whole, or not at all; and where it came from.

Invariant: a folder that was there before is never touched; one that could not be finished is removed, by this process or,
where it was killed, by the next one that makes a run of that name. Until then nobody takes it for a run.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import msgspec

from physarum.actors.context import Context, Identity, RunFolder
from physarum.actors.supervisor import run_folder
from physarum.actors.supervisor.bus_keeper import BusKeeper
from physarum.actors.supervisor.run_lock import RunLock
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import RunUnfitError
from physarum.bus.publisher import Publisher
from physarum.bus.server import EmbeddedServer
from physarum.configs.origin import display_path
from physarum.configs.root import RootConfig

START_MODEL_RECORD: Final = "start_model.json"


Kind = Literal["replay", "import", "fork"]


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """`lineage.json`: what a run was made from. `at`: when, in Unix seconds; `facts`: step, checkpoint, range, counts."""

    kind: Kind
    parent: str
    at: float
    facts: dict[str, Any]


@contextlib.asynccontextmanager
async def made(config: RootConfig, kind: Kind) -> AsyncIterator[OpenRun]:
    """A new run with its bus up and its streams empty; stopped at the end. Raises RunUnfitError when there is one already."""
    folder = RunFolder(config.run.folder)
    await _remove_unfinished(folder)
    if folder.path.exists():
        raise RunUnfitError(
            f"{display_path(folder.path)} exists; expected a name that is free. Choose another with --run, or remove the folder"
        )
    try:
        with RunLock(folder.path):
            folder.unfinished.write_text(kind)
            run_folder.prepare(folder, config)
            async with _bus_of(config, folder) as run:
                yield run
            folder.unfinished.unlink()
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


async def _remove_unfinished(folder: RunFolder) -> None:
    """What a killed tool left, its server included. Raises RunHeldError when another one is just making it."""
    if not folder.unfinished.exists():
        return
    with RunLock(folder.path):
        await EmbeddedServer(folder.bus).stop()
        shutil.rmtree(folder.path)


@contextlib.asynccontextmanager
async def _bus_of(config: RootConfig, folder: RunFolder) -> AsyncIterator[OpenRun]:
    keeper = BusKeeper(config, folder)
    try:
        bus = await keeper.connect()
        try:
            yield OpenRun(folder, config, bus, await Publisher(bus).start(), live=False)
        finally:
            await bus.close()
    finally:
        await keeper.stop()


def inherit_start_model(parent: RunFolder, child: RunFolder) -> None:
    """The child begins with the parent's start model as it lies there, not with one that is made again."""
    record = parent.path / START_MODEL_RECORD
    if record.is_file() and parent.start_model.is_dir():
        child.start_model.symlink_to(parent.start_model.resolve(), target_is_directory=True)
        run_folder.write_atomic(child.path / START_MODEL_RECORD, record.read_bytes())


def write_lineage(run: OpenRun, kind: Kind, parent: str, facts: dict[str, Any]) -> None:
    """Records where the run came from."""
    lineage = Lineage(kind=kind, parent=parent, at=time.time(), facts=facts)
    run_folder.write_atomic(run.folder.lineage, msgspec.json.encode(lineage))


def context_of(run: OpenRun) -> Context:
    """What publishing an execution needs. Blobs go to the run's folder alone: no checkpoint actor of it is there yet."""
    blobs = run.config.blobs.model_copy(update={"access": "folder", "replicas": 1})
    config = run.config.model_copy(update={"blobs": blobs})
    return Context(Identity(run.name, "tool", "tool-0"), config, run.folder, run.bus.endpoint, run.bus, run.publisher)
