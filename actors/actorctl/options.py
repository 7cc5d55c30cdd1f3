"""Arguments and options that several commands share, and how a result is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Optional

import msgspec
import orjson
import typer

from physarum.actors.actorctl import exits

SETTINGS: Final = {"ignore_unknown_options": True, "allow_interspersed_args": True}

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Settings = Annotated[
    Optional[list[str]],  # noqa: UP045  # typer reads the annotation at run time
    typer.Argument(
        metavar="[SETTING]...",
        help="Over the file: `trainer.lr=1e-4`, `--megatron-FIELD VALUE`, `--sglang-ARG VALUE`, `--router-ARG VALUE`.",
    ),
]
Target = Annotated[str, typer.Argument(metavar="NAME|CONFIG", help="A run's name, or its configuration.")]
Machine = Annotated[
    Optional[str],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option("--machine", help="Which one of `machines:` this host is (PHYSARUM_MACHINE); none: the head."),
]
Root = Annotated[Path, typer.Option("--root", help="Where run folders lie, for a NAME.")]
Policy = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--policy", help="Which of the run's policies, where it trains several; by default its own, model.name."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and more messages.")]


def group(help_text: str) -> typer.Typer:
    """A command with commands of its own, with the exit statuses below its help."""
    return typer.Typer(
        help=help_text, epilog=exits.HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )


def say(found: dict[str, Any], text: str, as_json: bool) -> None:
    """The result as JSON, or in words."""
    if as_json:
        print_json(found)
    else:
        typer.echo(text)


def print_json(value: object) -> None:
    """One JSON document; records become objects, integer keys text."""
    plain = msgspec.to_builtins(value, str_keys=True)
    typer.echo(orjson.dumps(plain, option=orjson.OPT_INDENT_2).decode())
