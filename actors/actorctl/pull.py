"""`actorctl weights pull URL FOLDER`: versions out of an object store for servers that others run; needs no run here.

Also `python -m physarum.actors.actorctl.pull`, which imports neither torch nor a bus: for the environment of such a server.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer

from physarum.actors.actorctl import exits
from physarum.actors.actorctl.options import Json, Verbose, print_json
from physarum.actors.tools import pulling
from physarum.weightsync.mirror.pulling import Pulled

_MIB = 1 << 20


def pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="As in checkpoint.versions.mirror: s3://bucket/prefix")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Gets a folder for each version, and `current`.")],
    run: Annotated[Optional[str], typer.Option(help="The run's name; without it the URL ends with it.")] = None,  # noqa: UP045
    version: Annotated[Optional[str], typer.Option(help="Instead of the newest: policy@1.20")] = None,  # noqa: UP045
    keep: Annotated[int, typer.Option(min=1, help="Versions kept in FOLDER.")] = 2,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each newer version.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, with --follow.")] = 10.0,
    then: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Told of each version: a URL that is POSTed model_path and weight_version, or a command."),
    ] = None,
    then_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that it may take.")] = 600.0,
    key_env: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The variable with the secret of checkpoint.versions.key_env."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each answer of the store.")] = 60.0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make a version of a run a Hugging Face folder here, every byte verified; FOLDER/current is switched in one step.

    Only what changed since an older version in FOLDER is read. With --json one object for each version.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")
    with exits.reported(verbose):
        if follow and version is not None:
            raise typer.BadParameter("give one of --version and --follow")
        asked = pulling.Asked(
            url=url, folder=folder, run=run, label=version, keep=keep, key_env=key_env, timeout_s=timeout, then=then,
            then_timeout_s=then_timeout,
        )  # fmt: skip
        if follow:
            pulling.follow(asked, every, lambda pulled: _say(pulled, as_json), time.sleep)
        else:
            _say(pulling.once(asked), as_json)


def _say(pulled: Pulled, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(pulled))
    elif pulled.new:
        sizes = f"{pulled.fetched_bytes / _MIB:.1f} MiB read, {pulled.reused_bytes / _MIB:.1f} MiB of an older version"
        typer.echo(f"{pulled.label} is current in {pulled.folder} ({sizes})")
    else:
        typer.echo(f"{pulled.label} is current already, in {pulled.folder}")


if __name__ == "__main__":
    typer.run(pull)
