"""`actorctl fork`: a new run from a checkpoint of another one, and its log from there, with a changed configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
import yaml

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Settings, Target, Verbose, say
from physarum.actors.context import RunFolder
from physarum.actors.tools import forking
from physarum.actors.tools.access import opened
from physarum.actors.tools.forking import Fork
from physarum.configs.loader import resolve
from physarum.configs.overrides import Override, parse_command_line
from physarum.configs.root import RootConfig


def fork(
    name: Target,
    step: Annotated[int, typer.Option("--at-step", min=0, help="A step with a checkpoint: see `checkpoints ls`.")],
    new: Annotated[str, typer.Option("--run", help="Name of the new run.")],
    settings: Settings = None,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make a new run that goes on from step N of another one, with settings changed. The other one is left as it is."""
    with exits.reported(verbose):
        folder = target.find(name, root)
        made = uvloop.run(_fork(folder, step, new, parse_command_line(settings or [])))
        text = (
            f"run {made.run} goes on from step {made.step} of {made.parent} with {made.samples} samples and"
            f" {made.tasks + made.episodes} tasks under way; start it: actorctl up {made.folder}/config.yaml"
        )
        say(msgspec.to_builtins(made), text, as_json)


async def _fork(folder: RunFolder, step: int, name: str, overrides: Sequence[Override]) -> Fork:
    async with opened(folder, "fork") as parent:
        durable = await forking.checkpoint_at(parent, step)
        return await forking.fork(parent, durable, forked_config(folder, name, overrides))


def forked_config(folder: RunFolder, name: str, overrides: Sequence[Override]) -> RootConfig:
    """The parent's configuration under another name, `overrides` above it. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as aside:
        top = Path(aside) / "fork.yaml"
        run = {"name": name, "root": str(folder.path.parent)}
        top.write_text(yaml.safe_dump({"extends": str(folder.config), "run": run}))
        return resolve(top, overrides)
