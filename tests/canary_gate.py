"""Hooks for tests: a gate that refuses the versions whose numbers it is given, and one that notes what it is told."""

from __future__ import annotations

from pathlib import Path

from physarum.actors.engine.gate import Probe, Refused
from physarum.weightsync.manifest import Manifest


async def refuse(probe: Probe, numbers: list[int]) -> None:
    if probe.manifest.version.number in numbers:
        raise Refused(f"number {probe.manifest.version.number} is not wanted")


async def note(manifest: Manifest, path: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{manifest.label}\n")


async def note_and_fail_at_first(manifest: Manifest, path: str) -> None:
    is_first = manifest.label not in (Path(path).read_text() if Path(path).exists() else "")
    await note(manifest, path)
    if is_first:
        raise OSError(f"{manifest.label} is not there yet")
