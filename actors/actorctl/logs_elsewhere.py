"""Logs of a run's other machines: their supervisors send the last lines over the bus."""

from __future__ import annotations

from collections.abc import Iterator

from physarum.actors.actorctl.logs import Line
from physarum.actors.actorctl.target import recorded_endpoint
from physarum.actors.context import RunFolder
from physarum.actors.supervising import SUPERVISOR
from physarum.actors.supervisor.errors import NotRunningError
from physarum.bus import control
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.presence import Roster

_CONNECT_S = 5.0
_ANSWER_S = 10.0


async def elsewhere(folder: RunFolder, instance: str | None, lines: int) -> list[Line]:
    """The last lines of one actor's log, or of every log of the other machines. Raises NotRunningError where none has it."""
    bus = await Bus.connect(recorded_endpoint(folder), folder.run, "logs", _CONNECT_S)
    try:
        async with Roster(bus, SUPERVISOR).open() as supervisors:
            others = [beat.instance for beat in supervisors.members if beat.facts.get("folder") != str(folder.path)]
        found: list[Line] = []
        refused: list[str] = []
        for name in others:
            body = {"instance": instance, "lines": lines}
            try:
                answer = await control.call(bus, SUPERVISOR, name, "logs", body, _ANSWER_S)
            except BusError as error:  # it has just gone
                answer = {"error": str(error)}
            if "error" in answer:
                refused.append(f"{name}: {answer['error']}")
            found += [line for log, text in answer.get("logs", {}).items() for line in _lines(log, text)]
    finally:
        await bus.close()
    if instance is not None and not found:
        raise NotRunningError(
            f"no machine of run {folder.run} has a log of {instance}: {'; '.join(refused) or 'none is there'}"
        )
    return found


def _lines(instance: str, text: str) -> Iterator[Line]:
    yield from (Line(instance, line) for line in text.splitlines())
