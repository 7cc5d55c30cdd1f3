"""When a run is finished: every policy's trainer said so, and (where asked for) the last version was evaluated."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final, TypeVar

import msgspec

from physarum.actors import policies, states
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)

_REREAD_S: Final = 30.0
_EVALUATION_GRACE_S: Final = 30.0
"""The evaluator has its own deadline and then reports what it has: it must be able to speak first."""

T = TypeVar("T", bound=msgspec.Struct)


async def finished(bus: Bus, publisher: Publisher, config: RootConfig) -> states.TrainerDone:
    """Waits for the end of training and of the evaluation of its result, which may time out (a warning, not an error)."""
    ends = Register(bus, publisher, "run", states.TrainerDone)
    done = await written(ends, states.TRAINER_DONE)
    _log.info("training is finished at %s: %s", done.version, done.reason)
    if config.evaluation is not None and config.evaluation.at_end:
        limit_s = config.evaluation.timeout_s * len(config.evaluation.named()) + _EVALUATION_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                await written(Register(bus, publisher, "run", states.EvalScore), states.EVAL_END)
        except TimeoutError:
            _log.warning(
                "the last version was not evaluated within %g s (evaluation.timeout_s): reward_end is unknown", limit_s
            )
    for policy in config.policies:
        other = await written(ends, *policies.key(states.TRAINER_DONE, policy))
        _log.info("training of %s is finished at %s: %s", policy, other.version, other.reason)
    return done


async def written(register: Register[T], *key: str) -> T:
    """The record under `key`, as soon as there is one."""
    async with register.watch(*key) as changed:
        while True:
            changed.clear()
            try:
                if (value := (await register.get(*key)).value) is not None:
                    return value
            except BusError as error:
                _log.info("register %s cannot be read now: %s", "/".join(key), error)
            # The hint comes with the write or with a reconnection; reading again now and then costs nothing.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REREAD_S):
                    await changed.wait()
