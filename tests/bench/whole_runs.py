"""Whole runs of a benchmark: by the command that users give, and what their logs and ledgers hold afterwards."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from physarum.actors.context import RunFolder
from physarum.actors.tools.access import opened
from physarum.actors.tools.exporting import execution_of
from physarum.actors.tools.recorded import Recorded
from physarum.bus import ledger
from physarum.bus.ledger import StepRecord
from physarum.bus.records import Sample
from tests.bench.processes import ROOT, environment

_RUN_S: Final = 900.0
_LINES: Final = 20


class RunFailedError(Exception):
    """A run did not end well; the text ends with its last lines."""


async def actorctl(command: str, recipe: Path, settings: dict[str, Any], log: Path) -> None:
    """`actorctl COMMAND RECIPE key=value ... --json` to its end; its output goes to `log`. Raises RunFailedError."""
    spelled = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    line = [sys.executable, "-m", "physarum.actors.actorctl", command, str(recipe), *spelled, "--json"]
    with log.open("wb") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, env=environment(), cwd=ROOT)
    try:
        async with asyncio.timeout(_RUN_S):
            status = await asyncio.to_thread(process.wait)
    finally:
        process.kill()
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
        raise RunFailedError(f"{command} of {recipe.name} ended with {status}; its last lines:\n{tail}")


async def recorded(folder: Path) -> tuple[list[Sample], list[StepRecord]]:
    """Every sample that an ended run still has, in the log's order, and its steps."""
    place = RunFolder(folder)
    samples: list[Sample] = []
    async with opened(place, "bench") as run:
        found = await Recorded.open(run.bus, place)
        async for entry in found.entries(1, found.last):
            samples += (await asyncio.to_thread(execution_of, place, entry)).samples
        steps = [item.record for item in await ledger.read(run.bus) if isinstance(item.record, StepRecord)]
    return samples, steps
