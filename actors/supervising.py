"""Whose supervisor is whose: each machine of a run has one, and claims the actors of that machine by its heartbeat."""

from __future__ import annotations

import asyncio
from typing import Final

from physarum.bus.presence import Roster
from physarum.configs.machines import HEAD
from physarum.configs.placement import machine_of
from physarum.configs.root import RootConfig

SUPERVISOR: Final = "supervisor"
INSTANCE: Final = "supervisor-0"
"""Of the head, or of a run's only machine."""


def supervisor_on(machine: str | None) -> str:
    """The instance of a machine's supervisor."""
    return INSTANCE if machine in (None, HEAD) else f"{SUPERVISOR}-{machine}"


def supervisor_of(config: RootConfig, role: str, instance: str) -> str:
    """The instance of the supervisor that starts an actor."""
    return supervisor_on(machine_of(config, role, instance))


async def until_alone(roster: Roster, instance: str, limit_s: float) -> None:
    """Returns once `instance` was not on the roster for `limit_s` on end."""
    clock = asyncio.get_running_loop().time
    seen_at = clock()
    while True:
        if any(beat.instance == instance for beat in roster.members):
            await roster.wait_change(limit_s)
            seen_at = clock()
        elif (rest_s := seen_at + limit_s - clock()) > 0:
            await roster.wait_change(rest_s)
        else:
            return
