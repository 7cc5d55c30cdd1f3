"""`actorctl export`: a run's recorded samples as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer
import uvloop

from physarum.actors.actorctl import exits, target
from physarum.actors.actorctl.options import Json, Root, Target, Verbose, say
from physarum.actors.context import RunFolder
from physarum.actors.tools import exporting
from physarum.actors.tools.access import opened
from physarum.actors.tools.demonstrations import Chosen, export_demonstrations
from physarum.actors.tools.exporting import Export

First = Annotated[Optional[int], typer.Option("--from", min=1, help="First sequence in the sample log.")]  # noqa: UP045
Last = Annotated[Optional[int], typer.Option("--to", min=1, help="Last sequence, included.")]  # noqa: UP045

Sft = Annotated[bool, typer.Option("--sft", help="Demonstrations instead of samples: JSON lines for source.data.")]
MinReward = Annotated[float, typer.Option("--min-reward", help="With --sft: the least reward of a sample.")]
Best = Annotated[bool, typer.Option("--best", help="With --sft: only the best sample of each group.")]


def export(
    name: Target,
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl|FILE.msgpack", help="The ending names the form.")],
    first: First = None,
    last: Last = None,
    sft: Sft = False,
    min_reward: MinReward = 1.0,
    best: Best = False,
    root: Root = target.RUNS,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the samples of a run to a file: .msgpack without loss, .jsonl readable. Trimmed ranges are named.

    With --sft: demonstrations for `trainer.objective: sft`, of the samples that are good enough.
    """
    with exits.reported(verbose):
        if sft:
            chosen = uvloop.run(_demonstrations(target.find(name, root), file, min_reward, best))
            text = f"{chosen.demonstrations} demonstrations of {chosen.samples} samples in {chosen.file}"
            say(msgspec.structs.asdict(chosen), text, as_json)
            return
        made = uvloop.run(_export(target.find(name, root), file, first, last))
        gone = ", ".join(f"{start} to {end}" for start, end in made.missing)
        missing = f"; missing (trimmed): {gone}" if gone else ""
        say(msgspec.structs.asdict(made), f"{made.executions} executions in {made.file}{missing}", as_json)


async def _demonstrations(folder: RunFolder, file: Path, min_reward: float, best: bool) -> Chosen:
    async with opened(folder, "export") as run:
        return await export_demonstrations(run, file, min_reward, best=best)


async def _export(folder: RunFolder, file: Path, first: int | None, last: int | None) -> Export:
    async with opened(folder, "export") as run:
        return await exporting.export(run, file, first, last)
