"""The classes of environments that the episodes of one rollout actor lease, with their places on the bus."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from typing import Any

from physarum.actors.context import Context
from physarum.agents.environments.lease import Instance, Place
from physarum.agents.environments.pool import EnvironmentPool
from physarum.bus.presence import Roster
from physarum.bus.slots import Holder, Slots
from physarum.configs.environments import EnvironmentClass
from physarum.configs.hooks import load_hook


@contextlib.asynccontextmanager
async def open_environments(context: Context) -> AsyncIterator[Mapping[str, EnvironmentPool]]:
    """By class. Who holds a place is told by the presence of rollout actors."""
    classes = context.config.environments
    if not classes:
        yield {}
        return
    pools: dict[str, EnvironmentPool] = {}

    def notify() -> None:
        for pool in pools.values():
            pool.slots.notify()

    me = Holder(context.identity.role, context.identity.instance, context.started_at)
    roster = Roster(context.bus, context.identity.role, on_change=notify)
    async with roster.open(), contextlib.AsyncExitStack() as stack:
        for name, config in classes.items():
            slots = Slots(context.bus, context.publisher, name, config.capacity, me, roster)
            pool = EnvironmentPool(name, config, slots, functools.partial(_start, config))
            pools[name] = await stack.enter_async_context(pool.open())
        yield pools


async def _start(config: EnvironmentClass, place: Place) -> Instance:
    hook: Any = load_hook(config.hook)
    made: Instance = await hook(place, **config.args)
    return made


def numbers_of(pools: Mapping[str, EnvironmentPool]) -> dict[str, float]:
    """For `actorctl ps`: leased and idle instances of each class."""
    return {f"{name}_{what}": getattr(pool, what) for name, pool in pools.items() for what in ("leased", "idle")}
