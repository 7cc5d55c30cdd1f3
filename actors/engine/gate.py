"""What a canary asks before others take its version: the user's function, or whether its numbers are numbers.

    async def gate(probe) -> None       # returns: it passes; raises Refused(reason), or anything: it is refused
        found = await probe.logprobs([1, 2, 3, 4])

Invariant: a gate that raises or is not done in time refuses; nothing but a return lets a version pass.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

import msgspec

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineError
from physarum.configs.engine import CanaryConfig
from physarum.configs.hooks import load_hook
from physarum.weightsync.manifest import Manifest

_log = logging.getLogger(__name__)

_PROBED_TOKENS: Final = 32


class Refused(Exception):
    """Raised by a gate: the version is not for others, because of this reason."""


class Probe(msgspec.Struct, frozen=True):
    """What a gate is given. The engine at `url` serves the version of `manifest`, ends the requests that it has and gets no new
    ones of rollouts meanwhile; `previous`: the label of the newest version that passed before; `timeout_s`: of a question."""

    url: str
    manifest: Manifest
    previous: str | None
    vocabulary: int
    timeout_s: float
    control: EngineControl

    @property
    def label(self) -> str:
        return self.manifest.label

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first given those before it, [T - 1]. Raises EngineError."""
        return await self.control.prompt_logprobs(token_ids, self.timeout_s)


Gate = Callable[..., Awaitable[None]]


async def finite(probe: Probe) -> None:
    """The gate where none is named: log-probabilities of random tokens are finite, and none is above 0."""
    tokens = random.Random(probe.label).choices(range(probe.vocabulary), k=_PROBED_TOKENS)
    found = await probe.logprobs(tokens)
    strange = [value for value in found if not math.isfinite(value) or value > 1e-3]
    if strange or len(found) != len(tokens) - 1:
        raise Refused(f"{len(strange)} of {len(found)} log-probabilities are no such numbers, the first {strange[:1]}")


async def refusal(config: CanaryConfig, probe: Probe) -> str | None:
    """Why the gate refuses the version; None: it passes."""
    gate = finite if config.gate is None else cast(Gate, load_hook(config.gate))
    arguments: dict[str, Any] = dict(config.args)
    try:
        async with asyncio.timeout(config.timeout_s):
            await gate(probe, **arguments)
    except Refused as error:
        return str(error)
    except TimeoutError:
        return f"the gate was not done within {config.timeout_s:g} s"
    except EngineError as error:
        return f"the engine did not answer the gate: {error}"
    except Exception as error:  # noqa: BLE001 - the user's code: whatever it raises is a refusal
        _log.exception("the gate of %s failed", probe.label)
        return f"the gate raised {type(error).__name__}: {error}"
    return None
