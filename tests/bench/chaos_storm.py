"""Kills one process after another, each after the recovery of the last, and says how long each recovery took."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.chaos_run import BUS, SERVER, SUPERVISOR, ChaosRun
from tests.bench.chaos_watch import Watch

_log = logging.getLogger(__name__)

_RECOVERY_S: Final = 300.0
_LONGEST_CALM_S: Final = 0.5


@dataclass(frozen=True)
class Kill:
    """`recovery_s`: from the signal to the successor's word that it works (the bus: that JetStream answers)."""

    victim: str
    at: float
    recovery_s: float

    @property
    def role(self) -> str:
        return role_of(self.victim)


def role_of(victim: str) -> str:
    """The role of an instance; a server counts as its engine."""
    if victim in (BUS, SUPERVISOR):
        return victim
    name = victim.removesuffix(SERVER).rsplit("-", 1)[0]
    return "engine" if name == "policy" else name


def schedule(victims: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` victims: in random order, but each once before any comes again."""
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(list(victims), len(victims))
    return order[:count]


async def strike(run: ChaosRun, watch: Watch, victim: str) -> Kill:
    """Kills one process and waits for its successor. Raises TimeoutError when none comes."""
    began, at = time.monotonic(), time.time()
    pid = run.kill(victim)
    _log.info("killed %s (pid %d)", victim, pid)
    if victim == SUPERVISOR:
        await run.up()
        await watch.until_ready("supervisor-0", pid, _RECOVERY_S)
    elif victim == BUS:
        await _another(run, pid)
        await watch.until_bus(_RECOVERY_S)
    else:
        actor = victim.removesuffix(SERVER)
        before = run.pid(actor) if victim != actor else pid
        await watch.until_ready(actor, before, _RECOVERY_S)
    return Kill(victim, at, time.monotonic() - began)


async def storm(
    run: ChaosRun, watch: Watch, victims: Sequence[str], rng: random.Random, *, last_number: int | None = None
) -> list[Kill]:
    """All `victims`, one after another, at random moments; none any more once weights `last_number` are made."""
    kills: list[Kill] = []
    for index, victim in enumerate(victims):
        await asyncio.sleep(rng.uniform(0.0, _LONGEST_CALM_S))  # the moment is the experiment, nothing is hoped for
        if last_number is not None and watch.number >= last_number:
            break
        kill = await strike(run, watch, victim)
        kills.append(kill)
        _log.info("kill %d of %d: %s recovered in %.2f s", index + 1, len(victims), victim, kill.recovery_s)
    return kills


async def _another(run: ChaosRun, pid: int) -> None:
    """Until the supervisor has started another server; the client reconnects by itself."""
    async with asyncio.timeout(_RECOVERY_S):
        while run.pid(BUS) in (0, pid):
            await asyncio.sleep(0.02)
