"""Starts runs of the latency model, each in a process of its own, some at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.bench.age_line import Spec
from tests.bench.age_measure import Measured
from tests.bench.processes import ROOT, environment

_log = logging.getLogger(__name__)

_RUN_S: Final = 1800.0
_LINES: Final = 20


class RunFailedError(Exception):
    """A run ended without a measurement; its last lines say why."""


def busy_processes() -> float:
    """The host's mean number of runnable processes over the last minute: whether something else was at work, too."""
    return round(os.getloadavg()[0], 1)


async def run_all(specs: Sequence[Spec], at_once: int) -> dict[str, Measured]:
    """What each measured, by name. Raises RunFailedError."""
    room = asyncio.Semaphore(at_once)
    with tempfile.TemporaryDirectory(prefix="age-specs-") as place:
        found = await asyncio.gather(*(_run(spec, Path(place), room) for spec in specs))
    return {spec.name: one for spec, one in zip(specs, found, strict=True)}


async def _run(spec: Spec, place: Path, room: asyncio.Semaphore) -> Measured:
    path, output, errors = (place / f"{spec.name}.{kind}" for kind in ("json", "out", "log"))
    path.write_bytes(msgspec.json.encode(spec))
    async with room:
        returncode = await _ended([sys.executable, "-m", "tests.bench.age_line", str(path)], output, errors)
    if returncode != 0:
        tail = "\n".join(errors.read_text(errors="replace").splitlines()[-_LINES:])
        raise RunFailedError(f"run {spec.name} ended with {returncode}; its last lines:\n{tail}")
    found = msgspec.json.decode(output.read_bytes().splitlines()[-1], type=Measured)
    _log.info("%s: %s", spec.name, found)
    return found


async def _ended(command: list[str], output: Path, errors: Path) -> int:
    """The exit status. A Popen: asyncio's own start of a process never ends when it is cancelled halfway."""
    with output.open("wb") as out, errors.open("wb") as log:
        process = subprocess.Popen(command, stdout=out, stderr=log, env=environment(), cwd=ROOT)
    try:
        async with asyncio.timeout(_RUN_S):
            return await asyncio.to_thread(process.wait)
    finally:
        process.kill()
