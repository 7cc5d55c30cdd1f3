"""How many actors a live or stopped run has: looked up, changed, and single ones paused or let go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from physarum.actors import cordons, scaling, states
from physarum.actors.scaling import Numbers
from physarum.actors.supervisor.errors import NotRunningError
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import RunUnfitError
from physarum.bus import control
from physarum.bus.presence import Roster
from physarum.bus.register import Register


async def sizes(run: OpenRun) -> dict[str, list[int]]:
    """The numbers of each group's instances, as they should be."""
    found = await _register(run).get(states.SCALE)
    return {name: list(numbers) for name, numbers in scaling.wanted(run.config, found.value).items()}


async def scale(run: OpenRun, changes: Sequence[str]) -> dict[str, list[int]]:
    """Applies changes (`rollout=8`, `policy=+2`), all or none. Raises RunUnfitError."""
    parsed = [scaling.parse(text) for text in changes]
    return await _change(run, lambda now: scaling.changed(run.config, now, parsed))


async def drain(run: OpenRun, instance: str) -> dict[str, list[int]]:
    """One actor finishes or hands back what it holds, leaves, and is not started again. Raises RunUnfitError."""
    return await _change(run, lambda now: scaling.without(run.config, now, instance))


async def pause(run: OpenRun, instance: str, paused: bool) -> dict[str, Any]:
    """One actor takes nothing new and keeps what it has; or goes on. Raises RunUnfitError where there is none of that name,
    NotRunningError where there is none at all."""
    async with Roster(run.bus).open() as roster:
        found = {beat.instance: beat.role for beat in roster.members}
    if not found:
        raise NotRunningError(f"run {run.name} is not running: no actor is there; start it (actorctl up)")
    if instance not in found:
        raise RunUnfitError(f"no actor {instance!r} is there; there are: {', '.join(sorted(found)) or 'none'}")
    verb = "pause" if paused else "resume"
    answer = await control.call(run.bus, found[instance], instance, verb, {}, run.bus.timeout_s)
    if "error" in answer:
        raise RunUnfitError(f"{instance} refused to {verb}: {answer['error']}")
    more, fewer = ([instance], []) if paused else ([], [instance])
    await cordons.record(run.bus, run.publisher, more, fewer)
    return answer


async def _change(run: OpenRun, change: Callable[[Mapping[str, Numbers]], dict[str, Numbers]]) -> dict[str, list[int]]:
    """Over what is there, by compare-and-set: two who scale at the same time do not undo each other."""
    if run.finished:
        raise RunUnfitError(f"run {run.name} is finished; expected one that has work for its actors")
    register = _register(run)
    entry = await register.get(states.SCALE)
    before = scaling.wanted(run.config, entry.value)
    wanted = change(before)
    plain = {name: list(numbers) for name, numbers in wanted.items()}
    await register.compare_and_set(states.Scaled(plain, time.time()), entry.revision, states.SCALE)
    await cordons.record(run.bus, run.publisher, fewer=scaling.gone(before, wanted))
    return plain


def _register(run: OpenRun) -> Register[states.Scaled]:
    return Register(run.bus, run.publisher, "run", states.Scaled)
