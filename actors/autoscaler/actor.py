"""The autoscaler actor: looks at each heartbeat that comes, and asks for as many actors as the policy says.

    presence, depth of TASKS --> signals.py --> policy.py --> RUN register (as `actorctl scale`) --> supervisors

It acts under a lease. What somebody asks for by hand is where it goes on from, within `least` and `most`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import ClassVar, Final, cast

from physarum.actors import cordons, scaling, states
from physarum.actors.autoscaler import signals
from physarum.actors.autoscaler.policy import Policy, Signal
from physarum.actors.leadership import leading
from physarum.actors.policy_engines import HANDING_OVER, ON_TRIAL, READY, evaluation_group, policy_group
from physarum.actors.runtime import Actor
from physarum.actors.tools.errors import RunUnfitError
from physarum.actors.waiting import unless_draining
from physarum.bus import log
from physarum.bus.errors import BusError, WrongSequenceError
from physarum.bus.presence import Heartbeat, Roster

_log = logging.getLogger(__name__)

_LOOK_S: Final = 10.0
"""Longest time without a look; signals last while nobody is heard."""


class AutoscalerActor(Actor):
    """Role autoscaler. `numbers`: what each group should have."""

    role: ClassVar[str] = "autoscaler"

    async def run(self) -> None:
        settings = self.config.autoscale
        assert settings is not None
        self._settings = settings
        self._policies = {name: Policy(group) for name, group in settings.groups.items()}
        self._said: dict[str, int] = {}
        self._begun = False
        self.become("standby")
        async with leading(self.context, "autoscaler") as lease:
            if lease is not None:
                await unless_draining(self.context, self._watch())

    async def _watch(self) -> None:
        async with Roster(self.bus).open() as roster:
            self.become("ready")
            await self._looking(roster)

    async def _looking(self, roster: Roster) -> None:
        while True:
            await roster.wait_change(_LOOK_S)
            await self.context.resumed.wait()
            try:
                await self._look(roster.members)
            except (BusError, WrongSequenceError, RunUnfitError) as error:
                _log.warning("the sizes of groups stay as they are for now: %s", error)
            await asyncio.sleep(self.config.supervisor.heartbeat_s)  # one look for many heartbeats

    async def _look(self, beats: list[Heartbeat]) -> None:
        register = self.context.run_register(states.Scaled)
        entry = await register.get(states.SCALE)
        now = scaling.wanted(self.config, entry.value)
        signal = await self._signals(beats)
        changes = []
        for name, policy in self._policies.items():
            states_of = [beat.state for beat in beats if beat.instance.rpartition("-")[0] == name]
            if HANDING_OVER in states_of:
                continue  # pairs take a version, for a second: what was seen before goes on to last
            ready = states_of.count(READY) + states_of.count(
                ON_TRIAL
            )  # which is over soon, and no change of the group's
            size = policy.decide(signal[name], len(now[name]), ready, time.monotonic())
            self.numbers[f"{name}_wanted"] = size
            if size != len(now[name]):
                changes.append(scaling.Change(name, size, relative=False))
                self._say(name, len(now[name]), size, signal[name])
        self.numbers["looks"] = self.numbers.get("looks", 0) + 1
        if changes and not self._settings.dry_run:
            wanted = scaling.changed(self.config, now, changes)
            scaled = states.Scaled({name: list(numbers) for name, numbers in wanted.items()}, time.time())
            await register.compare_and_set(scaled, entry.revision, states.SCALE)
            if left := scaling.gone(now, wanted):
                await cordons.record(self.bus, self.publisher, fewer=left)

    def _say(self, name: str, before: int, after: int, signal: Signal) -> None:
        if self._settings.dry_run and self._said.get(name) == after:
            return
        self._said[name] = after
        what = "would be scaled" if self._settings.dry_run else "is scaled"
        _log.info("%s is %s: it %s from %d to %d", name, signal, what, before, after)

    async def _signals(self, beats: list[Heartbeat]) -> dict[str, Signal]:
        rollouts = [beat for beat in beats if beat.role == "rollout"]
        running = sum(int(beat.numbers.get("running", 0)) for beat in rollouts)
        queued = max(0, (await log.state(self.bus, "tasks")).messages - running)
        found: dict[str, Signal] = {}
        for name, group in self._settings.groups.items():
            if name != "rollout":
                engines = [beat for beat in beats if beat.role == "engine" and beat.facts.get("group") == name]
                found[name] = signals.of_engines(group, engines, self._waiting(name, rollouts))
        if "rollout" in self._settings.groups:
            group, serving = (
                self._settings.groups["rollout"],
                {policy_group(self.config), evaluation_group(self.config)},
            )
            full: Signal = "pressed" if any(found.get(name) == "pressed" for name in serving) else "fine"
            found["rollout"] = signals.of_rollouts(group, rollouts, self.config.rollout.slots, queued, full)
        return await self._once_training_began(found)

    def _waiting(self, group: str, rollouts: list[Heartbeat]) -> float:
        """Episodes that wait for a place on the group's engines."""
        of_group = {evaluation_group(self.config): "evaluating_waiting", policy_group(self.config): "waiting"}
        number = of_group.get(group)
        return 0.0 if number is None else sum(beat.numbers.get(number, 0) for beat in rollouts)

    async def _once_training_began(self, found: dict[str, Signal]) -> dict[str, Signal]:
        """While the start model is evaluated nothing trains: that what training needs idles says nothing then."""
        evaluation = self.config.evaluation
        if evaluation is None or not evaluation.at_start or self._begun:
            return found
        score = await self.context.run_register(states.EvalScore).get(states.EVAL_START)
        self._begun = score.value is not None
        needed = ("rollout", policy_group(self.config))
        waits = {name: "fine" for name in needed if found.get(name) == "idle"} if not self._begun else {}
        return found | cast(dict[str, Signal], waits)
