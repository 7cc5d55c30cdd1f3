"""`actorctl evals`: what each version that was evaluated scored."""

from __future__ import annotations

import typer
import uvloop

from physarum.actors import states
from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, print_json
from physarum.actors.context import RunFolder
from physarum.actors.evaluator.scores import described
from physarum.actors.states import EvalScore
from physarum.actors.tools.access import opened
from physarum.bus.register import Register
from physarum.bus.version import Version


def evals(name: Target, root: Root = target.RUNS, as_json: Json = False, verbose: Verbose = False) -> None:
    """List the held-out scores of every version that was evaluated, by set."""
    with exits.reported(verbose):
        found = uvloop.run(_scores(target.find(name, root)))
        if as_json:
            print_json({"evaluations": found})
            return
        for score in found:
            for part, one in score.sets.items():
                typer.echo(f"{score.version:<16} {part:<12} {described(one)}")
        if not found:
            typer.echo(f"no version of run {name} was evaluated")


async def _scores(folder: RunFolder) -> list[EvalScore]:
    async with opened(folder, "evals") as run:
        register: Register[EvalScore] = Register(run.bus, run.publisher, "run", EvalScore)
        return sorted(await register.entries(states.EVAL_AT), key=lambda score: Version.parse(score.version))
