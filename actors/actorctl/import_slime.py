"""`actorctl import-slime`: slime's engines, from its `--sglang-config` file, its flags, or the script that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Optional

import typer
from pydantic import JsonValue, ValidationError

from physarum.actors.actorctl import exits
from physarum.actors.actorctl.options import Json, Verbose, print_json
from physarum.configs.engine import EngineConfig
from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.origin import Origins
from physarum.configs.problems import schema_problems
from physarum.configs.slime_engines import import_engines
from physarum.configs.slime_flags import SlimeFlags, parse_flags, words_of_script
from physarum.configs.yaml_file import Layer, read_yaml, write_yaml

_YAML: Final = (".yaml", ".yml")


def import_slime(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="slime's --sglang-config, or a shell script.", exists=True, dir_okay=False),
    ],
    flags: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[FLAG]...", help="slime's flags, over the script's: `--rollout-num-gpus-per-engine 2`."
        ),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print slime's engines as `engines:` for a run's YAML. Flags of other parts of slime are named on stderr.

    Write `--` before flags that begin as options of this command do.
    """
    with exits.reported(verbose):
        layer, read = _read(file, flags or [])
        found, left_out = import_engines(layer, read)
        _check(found)
        if as_json:
            print_json({**found, "left_out": list(left_out)})
            return
        typer.echo(write_yaml(dict(found)), nl=False)
        if left_out:
            typer.echo(f"without a place in engines, and left out: {' '.join(left_out)}", err=True)


def _read(file: Path, flags: list[str]) -> tuple[Layer, SlimeFlags]:
    """A script may name its file; it is then read, too, from the script's folder."""
    if file.suffix.lower() in _YAML:
        return read_yaml(file.absolute()), parse_flags(flags)
    read = parse_flags([*words_of_script(file.read_text(encoding="utf-8", errors="replace"), file.name), *flags])
    if read.config_file is None:
        return Layer(), read
    return read_yaml(file.absolute().parent / Path(read.config_file).expanduser()), read


def _check(found: dict[str, JsonValue]) -> None:
    """What was made of it is a configuration. Raises ConfigError."""
    engines: Any = found["engines"]
    problems: list[Problem] = []
    for name, group in engines.items():
        try:
            EngineConfig.model_validate(group, strict=False)
        except ValidationError as error:
            origins = Origins()
            problems += schema_problems(error, EngineConfig, origins, ("engines", name))
    if not engines:
        problems.append(Problem(Severity.ERROR, "sglang", "no model", "at least one", "add one"))
    if problems:
        raise ConfigError(problems)
