"""What an episode holds while it leases an instance, and what can go wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

from physarum.agents.errors import AgentError
from physarum.bus.slots import Slot


class EnvironmentLeaseError(AgentError):
    """Base of what can go wrong between an episode and what it leases."""


class NoEnvironmentError(EnvironmentLeaseError):
    """No place was free in time, or the run has no such class."""


class EnvironmentStartError(EnvironmentLeaseError):
    """The class's hook started nothing."""


class EnvironmentLostError(EnvironmentLeaseError):
    """The bus took this worker for gone and gave its place to another: the instance is not ours any more."""


class Instance(Protocol):
    """What a class's hook returns."""

    async def close(self) -> None:
        """Ends it and everything that it started."""
        ...


class Place(NamedTuple):
    """Where an instance runs: place `number` of the class, from 0. Whatever runs there under a smaller `token` was left by a
    worker that is gone: a hook that names what it starts by class and number can find it, and end it."""

    name: str
    number: int
    token: int


class Leased(NamedTuple):
    """What an episode holds inside `async with`."""

    instance: Any
    place: Place


@contextlib.asynccontextmanager
async def ends_when_lost(slot: Slot, name: str) -> AsyncIterator[None]:
    """Cancels the block when its slot is lost; out of it comes EnvironmentLostError, as TimeoutError comes out of a timeout."""
    task, said = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal said
        await slot.lost.wait()
        said = True
        task.cancel()

    watching = asyncio.create_task(watch(), name=f"place {slot.number} of {name}")
    try:
        yield
    except asyncio.CancelledError:
        if said and task.uncancel() == 0:
            raise EnvironmentLostError(
                f"place {slot.number} of environments.{name} (token {slot.token}) was given to another worker, for this one was"
                " silent for too long; its instance is closed"
            ) from None
        raise
    finally:
        watching.cancel()
