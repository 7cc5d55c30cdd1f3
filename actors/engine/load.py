"""An engine's load, sampled and announced: what engines are chosen by, the limit that is shared, and whether it is well.

    /v1/loads every `concurrency.period_s` --answers--> facts.load, numbers --> presence, at once
                  |--is silent--> unreachable: no traffic, in flight goes on --answers--> ready again
                  `--silent for `unresponsive_timeout_s`--> started anew (one at a `url` is waited for)

Invariant: that an actor is alive (it beats) says nothing about its server, and a server that is silent is not dead: it may be
loading weights or compiling a kernel. Only time tells, and it is counted in minutes.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING, Final

import msgspec

from physarum.actors.engine.control import Capabilities, EngineControl, Load
from physarum.actors.engine.errors import EngineError
from physarum.actors.engine.limit import Limit, LimitRules, LoadSample
from physarum.actors.errors import ActorError
from physarum.actors.policy_engines import READY
from physarum.bus.connection import Bus
from physarum.bus.presence import Roster
from physarum.configs.engine import ConcurrencyConfig, EngineConfig

if TYPE_CHECKING:
    from physarum.actors.engine.actor import EngineActor

_log = logging.getLogger(__name__)

UNREACHABLE: Final = "unreachable"
_SILENT_SAMPLES: Final = 3
"""So many unanswered samples in a row take a server of our own out of traffic; somebody else's goes at the first."""


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """facts.load. `limit`: requests that the engine should have at once, of all clients together; None: no limit.

    `tokens`: held by running requests and still to be prefilled; `capacity`: of its KV pool, None where it does not say.
    """

    there: int
    tokens: int
    limit: int | None = None
    capacity: int | None = None


class LoadReport:
    """Of one engine. `follow` is told of silence and of answers."""

    def __init__(
        self,
        actor: EngineActor,
        settings: EngineConfig,
        control: EngineControl,
        can: Capabilities,
        found: float | None = None,
    ) -> None:
        """`found`: the limit that the group's other engines came to."""
        self._actor, self._settings, self._control, self._found = actor, settings, control, found
        self._longest_tokens = can.longest_tokens
        self._limit: Limit | None = None
        self._made: float | None = None
        self._sampled_at = time.monotonic()
        self._answered_at = time.monotonic()
        self._silent = 0

    async def sample(self) -> None:
        """Asks once and announces. Raises ActorError when the server has been silent for too long."""
        try:
            load = await self._control.loads()
            await self._actor.answered(whole=self._settings.url is not None or self._silent >= _SILENT_SAMPLES)
        except EngineError as error:
            self._unanswered(error)
            return
        self._silent, self._answered_at = 0, time.monotonic()
        self._announce(load)

    def _unanswered(self, error: EngineError) -> None:
        self._silent += 1
        _log.debug("no load from the engine: %s", error)
        if self._settings.url is not None or self._silent >= _SILENT_SAMPLES:
            self._actor.silent(error)
        silent_s = time.monotonic() - self._answered_at
        if self._settings.url is None and silent_s > self._settings.unresponsive_timeout_s:
            raise ActorError(
                f"the engine has not reported its load for {silent_s:.0f} s, expected an answer within"
                f" engines.<group>.unresponsive_timeout_s = {self._settings.unresponsive_timeout_s:g} s; it is started anew."
                f" Last: {error}"
            ) from error

    def _announce(self, load: Load) -> None:
        limit = self._limited(load)
        actor = self._actor
        actor.numbers |= {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": round(load.token_usage, 3),
            "tokens_per_s": round(load.generated_tokens_per_s, 1),
        }
        if limit is not None and self._limit is not None:
            actor.numbers |= {"limit": limit, "queue_s": round(self._limit.queue_s, 2)}
        announced = Announced(
            there=load.running + load.waiting,
            tokens=load.used_tokens + (load.waiting_tokens or 0),
            limit=limit,
            capacity=load.capacity_tokens,
        )
        actor.facts = {**actor.facts, "load": msgspec.to_builtins(announced)}
        actor.announce()

    def _limited(self, load: Load) -> int | None:
        """The limit after this sample. The first one makes it: only then the server's own bounds are known."""
        config = self._settings.concurrency
        if config is None or self._actor.facts.get("role") == "prefill":
            return None  # whoever may decode may be prefilled for: the limit of the other half holds for the pair
        if self._limit is None:
            rules = limit_rules(config, load.running_at_most, self._longest_tokens)
            self._limit = Limit(rules, self._found)
        before, reason = self._limit.value, self._limit.reason
        after = self._limit.observe(self._as_sample(load))
        if self._limit.reason != reason or after < before:
            _log.info("limit %d -> %d requests: %s", before, after, self._limit.reason)
        return after

    def _as_sample(self, load: Load) -> LoadSample:
        now = time.monotonic()
        if load.generated_tokens_per_s > 0 or self._made is not None:
            self._made = (self._made or 0.0) + load.generated_tokens_per_s * (now - self._sampled_at)
        self._sampled_at = now
        return LoadSample(
            at=now,
            running=load.running,
            waiting=load.waiting,
            used_tokens=load.used_tokens,
            capacity_tokens=load.capacity_tokens,
            made_tokens=self._made,
            prefilled_tokens=load.prefilled_tokens,
            waiting_tokens=load.waiting_tokens,
            retracted=load.retracted,
        )


async def limit_of_peers(bus: Bus, group: str) -> float | None:
    """The median limit of the ready engines of a group; None where there is none. A joiner need not find it anew."""
    async with Roster(bus, "engine").open() as engines:
        beats = [one for one in engines.members if one.state == READY and one.facts.get("group") == group]
    loads = [msgspec.convert(one.facts["load"], Announced) for one in beats if "load" in one.facts]
    limits = [one.limit for one in loads if one.limit is not None]
    return statistics.median(limits) if limits else None


def limit_rules(config: ConcurrencyConfig, running_at_most: int | None, longest_tokens: int | None) -> LimitRules:
    """`running_at_most`: what the server itself runs at once, a ceiling where none is configured."""
    ceilings = {} if (ceiling := config.ceiling or running_at_most) is None else {"ceiling": max(config.floor, ceiling)}
    return LimitRules(
        floor=config.floor,
        start=config.start,
        kv_target=config.kv_target,
        queue_target_s=config.queue_target_s,
        decrease=config.decrease,
        step=config.step,
        longest_tokens=longest_tokens,
        **ceilings,
    )
