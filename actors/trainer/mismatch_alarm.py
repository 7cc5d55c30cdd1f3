"""Says when engine and trainer drift apart exponentially: a collapse shows there long before it shows in the reward.

Invariant: one warning per onset; a drift that ends arms the alarm again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from physarum.actors.trainer.algorithms.corrections import is_growing

_log = logging.getLogger(__name__)

METRIC = "kl_k3"
FLOOR = 1e-5
"""Below this (nats per token) a drift is rounding: bf16 engines lie at 1e-3, float32 ones at 1e-7."""


class MismatchAlarm:
    """Looks at the last `window` steps; `doubling_steps`: growth that doubles the mismatch faster than this is reported."""

    def __init__(self, window: int, doubling_steps: float) -> None:
        self._window, self._doubling_steps = window, doubling_steps
        self._values: deque[float] = deque(maxlen=window)
        self._growing = False

    def saw(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metric `mismatch_growing` (0 or 1) for a step; nothing where the step measured no mismatch."""
        value = metrics.get(METRIC)
        if value is None:
            return {}
        self._values.append(value)
        growing = value > FLOOR and is_growing(list(self._values), self._window, self._doubling_steps)
        if growing and not self._growing:
            _log.warning(
                "the mismatch between engine and trainer grows: KL (k3) rose from %.2g to %.2g nats per token within %d steps."
                " Look at the correction's rejected share, lower age.bound or the learning rate, or compare the numerics of"
                " engine and trainer (docs/algorithms.md)",
                *(self._values[0], value, self._window),
            )
        self._growing = growing
        return {"mismatch_growing": float(growing)}
