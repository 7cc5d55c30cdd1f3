"""A circuit breaker between this process and one engine (Nygard, "Release It!", 2007), with jitter between its probes.

    closed --refused connection, or `failures` other failures in a row--> open --after a while--> half-open: one probe
       ^                                                                    ^                        |       |
       +-- the probe is answered -------------------------------------------|------------------------+       |
                                                                            +--- the probe fails: longer ----+

Only what may be the engine's fault counts: no connection, no answer in time, 5xx, a body that is no reply. A refusal (4xx) is
an answer. Invariant: while it is open nothing is sent, while it is half-open one request at a time; an engine that started anew
begins closed.
"""

from __future__ import annotations

import random
from typing import Literal

import aiohttp
import msgspec

from physarum.agents.errors import EngineFailedError, EngineReplyError
from physarum.agents.retries import decorrelated_s

Fault = Literal["connect", "timeout", "server", "broken"]
State = Literal["closed", "open", "half_open"]


def fault_of(error: BaseException) -> Fault | None:
    """What the failure says of the engine; None: nothing (the request's own fault, or tokens of other weights)."""
    if isinstance(error, (aiohttp.ClientConnectorError, ConnectionRefusedError)):
        return "connect"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, EngineFailedError):
        return "server"
    return "broken" if isinstance(error, (aiohttp.ClientError, OSError, EngineReplyError)) else None


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`failures` in a row open it (a refused connection at once); a probe follows after `base_s` to `max_s`."""

    failures: int = 3
    base_s: float = 0.5
    max_s: float = 30.0


class Breaker:
    """`now` is monotonic seconds, given by the caller."""

    def __init__(self, policy: BreakerPolicy, rng: random.Random) -> None:
        self._policy, self._rng = policy, rng
        self._failures = 0
        self._wait_s = 0.0
        self._until: float | None = None
        self._probing = False

    def state(self, now: float) -> State:
        if self._until is None:
            return "closed"
        return "half_open" if now >= self._until else "open"

    def allows(self, now: float) -> bool:
        """Whether one more request may be sent."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._probing)

    @property
    def probe_at(self) -> float | None:
        """When a probe may be sent; None where no time is waited for."""
        return None if self._probing else self._until

    def sent(self) -> bool:
        """A request goes out; True: it is the probe, to be told of at its end."""
        if self._until is None:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """The engine answered."""
        self._failures, self._wait_s, self._until, self._probing = 0, 0.0, None, False

    def failed(self, fault: Fault, now: float, probe: bool = False) -> None:
        """A request failed. One that was sent before the breaker opened says nothing new."""
        self._failures += 1
        if self._until is not None and not probe:
            return
        if probe or fault == "connect" or self._failures >= self._policy.failures:
            self._wait_s = decorrelated_s(self._rng, self._policy.base_s, self._wait_s, self._policy.max_s)
            self._until, self._probing = now + self._wait_s, False

    def given_up(self) -> None:
        """The probe ended without a word on the engine (it was cancelled): another one may be sent."""
        self._probing = False
