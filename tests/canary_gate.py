"""A gate for tests: refuses the versions whose numbers it is given."""

from __future__ import annotations

from physarum.actors.engine.gate import Probe, Refused


async def refuse(probe: Probe, numbers: list[int]) -> None:
    if probe.manifest.version.number in numbers:
        raise Refused(f"number {probe.manifest.version.number} is not wanted")
