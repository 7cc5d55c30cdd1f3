"""When a group grows or shrinks. Pure; times are of one monotonic clock.

    pressed for up_after_s  -> grows by a share of its size     idle for down_after_s -> one leaves

Hysteresis: between `low` and `high` nothing happens, a signal must last, a change begins all waits anew, and nothing is
decided while actors of the last change are still missing, so that slow starts (minutes) are not answered by more.
"""

from __future__ import annotations

import math
from typing import Literal

from physarum.configs.autoscale import GroupScaling

Signal = Literal["pressed", "fine", "idle"]


class Policy:
    """Of one group."""

    def __init__(self, config: GroupScaling) -> None:
        self._config = config
        self._signal: Signal = "fine"
        self._since = -math.inf

    def decide(self, signal: Signal, wanted: int, ready: int, now: float) -> int:
        """How many there should be. `wanted`: asked for now; `ready`: those that work."""
        if signal != self._signal or ready < wanted:
            self._signal, self._since = signal, now
        bounded = min(max(wanted, self._config.least), self._config.most)
        if bounded != wanted:
            return bounded
        lasted_s = now - self._since
        if signal == "pressed" and lasted_s >= self._config.up_after_s:
            self._since = now
            return min(self._config.most, wanted + max(1, math.ceil(self._config.step * wanted)))
        if signal == "idle" and lasted_s >= self._config.down_after_s:
            self._since = now
            return max(self._config.least, wanted - 1)
        return wanted
