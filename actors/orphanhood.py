"""When an actor drains by itself, because nobody is there who would ever stop it.

its machine's supervisor was away for run.orphan_timeout_s
of several machines: the head has ended the run, and its machine's supervisor is not there to say so
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.supervising import SUPERVISOR, supervisor_of, until_alone
from physarum.bus.errors import BusError
from physarum.bus.presence import EXPIRY_S, Roster
from physarum.bus.register import Register
from physarum.configs.machines import HEAD
from physarum.configs.placement import machine_of

_log = logging.getLogger(__name__)

_AGAIN_S: Final = 1.0
_REREAD_S: Final = 30.0


async def until_orphaned(context: Context) -> str:
    """Why nobody will stop this actor, once that is so. A bus that is just away is no reason, and ends nothing."""
    while True:
        try:
            return await _orphaned(context)
        except BusError as error:  # no event says when a server that is back serves its streams again
            _log.info("who supervises cannot be read now, trying again: %s", error)
            await asyncio.sleep(_AGAIN_S)


async def _orphaned(context: Context) -> str:
    config, who = context.config, context.identity
    mine, limit_s = supervisor_of(config, who.role, who.instance), config.run.orphan_timeout_s
    async with Roster(context.bus, SUPERVISOR).open() as supervisors:
        waits = [asyncio.create_task(until_alone(supervisors, mine, limit_s), name="no supervisor")]
        if machine_of(config, who.role, who.instance) != HEAD:
            waits.append(asyncio.create_task(_over_and_alone(context, supervisors, mine), name="no run"))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
    if waits[0] in done:
        return f"no supervisor for {limit_s:g} s (run.orphan_timeout_s)"
    return "the head has ended the run, and no supervisor is there"


async def _over_and_alone(context: Context, supervisors: Roster, mine: str) -> None:
    """A supervisor that is there drains us by itself; a run may be opened again before it is looked for in vain."""
    register = context.run_register(states.Assembly)
    while True:
        await word(register, lambda found: found.phase != "open")
        await until_alone(supervisors, mine, EXPIRY_S)
        if (await word(register, lambda found: True)).phase != "open":
            return


async def word(register: Register[states.Assembly], satisfied: Callable[[states.Assembly], bool]) -> states.Assembly:
    """The head's record, once it is such."""
    async with register.watch(states.ASSEMBLY) as changed:
        while True:
            changed.clear()
            try:
                found = (await register.get(states.ASSEMBLY)).value
            except BusError as error:  # the head makes the streams
                _log.info("the head's word cannot be read now: %s", error)
                found = None
            if found is not None and satisfied(found):
                return found
            # The hint comes with the write or with a reconnection; reading again now and then costs nothing.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REREAD_S):
                    await changed.wait()
