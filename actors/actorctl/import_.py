"""`actorctl import`: exported samples back into a run's sample log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Verbose, say
from physarum.actors.context import RunFolder
from physarum.actors.tools import replaying
from physarum.actors.tools.access import opened
from physarum.actors.tools.exported import read_head
from physarum.configs.errors import ConfigError, Problem, Severity

_LEFT_OUT: Final = {"duplicates": "further copies", "alone": "alone of their groups", "evaluation": "of evaluation"}


def import_file(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `actorctl export` wrote.", exists=True, dir_okay=False)
    ],
    name: Annotated[Optional[str], typer.Argument(metavar="[RUN]", help="A run that gets them too.")] = None,  # noqa: UP045
    new: Annotated[Optional[str], typer.Option("--run", help="A new run that holds them.")] = None,  # noqa: UP045
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave lines out that are no executions.")] = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Read exported samples back: into a run as one more source, or as a new run to replay.

    Lines that are no executions are named by their numbers, and nothing is imported.
    """
    with exits.reported(verbose):
        if (name is None) == (new is None):
            remedy = "write `import FILE RUN`, or `import FILE --run NAME`"
            raise ConfigError(
                [Problem(Severity.ERROR, "import", "both or neither", "one of RUN and --run NAME", remedy)]
            )
        if new is not None:
            found = uvloop.run(_into_new(file, new, root, skip_bad))
        else:
            assert name is not None
            found = uvloop.run(_into(file, target.find(name, root), skip_bad))
        fed, skipped = found["fed"], found["skipped"]
        text = f"{fed['executions']} executions in {fed['groups']} groups are in run {found['run']}"
        text += "".join(f"; {fed[key]} {word} left out" for key, word in _LEFT_OUT.items() if fed[key])
        text += "".join(f"\nline {number} left out: {reason}" for number, reason in skipped)
        say(found, text, as_json)


async def _into_new(file: Path, name: str, root: Path, skip_bad: bool) -> dict[str, Any]:
    config = replaying.replay_config(read_head(file), name, root, None, [])
    made = await replaying.make_from_file(file, config, skip_bad=skip_bad)
    plain: dict[str, Any] = msgspec.to_builtins(made)
    return plain


async def _into(file: Path, folder: RunFolder, skip_bad: bool) -> dict[str, Any]:
    async with opened(folder, "import") as run:
        plain: dict[str, Any] = msgspec.to_builtins(await replaying.add_to(run, file, skip_bad=skip_bad))
        return plain
