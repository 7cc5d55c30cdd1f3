"""`actorctl eval`: scores a model as a run's evaluation does, without training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Final, Optional

import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.ledger import refuse_open
from physarum.actors.actorctl.options import Config, Json, Root, Settings, Verbose
from physarum.actors.actorctl.up import run_to_end
from physarum.actors.tools.access import opened
from physarum.actors.tools.hf_export import export_hf
from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.loader import resolve
from physarum.configs.overrides import Override, parse_command_line
from physarum.configs.root import RootConfig

_EVALUATING: Final = (
    Override(("trainer", "record_only"), True),
    Override(("trainer", "ordered"), False),
    Override(("age", "admission"), "free"),
    Override(("age", "consumption"), "mask"),
    Override(("age", "in_flight"), "continue"),
    Override(("evaluation", "at_start"), True),
    Override(("evaluation", "at_end"), False),
    Override(("stop", "evaluated"), True),
)
"""What makes a run of its evaluation alone."""


def evaluate(
    config: Config,
    settings: Settings = None,
    model: Annotated[Optional[Path], typer.Option("--model", help="A Hugging Face folder.")] = None,  # noqa: UP045
    run: Annotated[Optional[str], typer.Option("--run", help="A run whose checkpoint is taken.")] = None,  # noqa: UP045
    checkpoint: Annotated[Optional[str], typer.Option("--checkpoint", help="The newest, if not given.")] = None,  # noqa: UP045
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Score a model on the `evaluation` of CONFIG, as a run of its own (run.name with -eval behind it, unless it is set):
    the start model of CONFIG, a folder, or a checkpoint of a run. `actorctl evals` shows the scores again."""
    with exits.reported(verbose):
        words = parse_command_line(settings or [])
        found = resolve(config, [*words, *_EVALUATING])
        if found.machines:
            raise ConfigError([_several(found)])
        named = any(word.key == ("run", "name") for word in words)
        name = found.run.name if named else f"{found.run.name}-eval"
        chosen = _model(model, run, checkpoint, root, found.run.root / name)
        further = [] if chosen is None else [Override(("model", "path"), str(chosen))]
        made = resolve(config, [*words, *_EVALUATING, Override(("run", "name"), name), *further])
        refuse_open(run_to_end(made, as_json, verbose)["account"])


def _several(config: RootConfig) -> Problem:
    where, remedy = config.origins.where(("machines",)), "name a file without them, which the run's may extend"
    return Problem(Severity.ERROR, where, "`machines`, of which an evaluation starts none", "one machine", remedy)


def _model(model: Path | None, run: str | None, checkpoint: str | None, root: Path, place: Path) -> Path | None:
    """The folder to score; a checkpoint is written beside the new run's folder, once."""
    if (model is not None and run is not None) or (checkpoint is not None and run is None):
        problem = Problem(
            Severity.ERROR, "eval", "--model and --run, or --checkpoint without --run", "one model",
            "name a folder (--model), or a run (--run, --checkpoint)",
        )  # fmt: skip
        raise ConfigError([problem])
    if run is None:
        return None if model is None else model.absolute()
    folder = place.with_name(f"{place.name}-{checkpoint or 'newest'}-model")
    if not folder.exists():
        uvloop.run(_exported(run, root, checkpoint, folder))
    return folder


async def _exported(run: str, root: Path, checkpoint: str | None, folder: Path) -> Any:
    await asyncio.to_thread(folder.parent.mkdir, parents=True, exist_ok=True)
    async with opened(target.find(run, root), "eval") as there:
        return await export_hf(there, folder, checkpoint, None)
