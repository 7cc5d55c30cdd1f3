"""Says when replay is asked for and nothing was recorded: the run trains, with the trainer's own choices.

Invariant: one warning per onset and metric.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

_log = logging.getLogger(__name__)

RECORDS: Final = {
    "routing_replayed": "routed_experts (trainer.algorithm.replay.routing)",
    "nucleus_replayed": "kept_tokens (trainer.algorithm.replay.nucleus)",
}
"""The metrics of `replay.replay_metrics`: what a sample must bring."""


class ReplayAlarm:
    """Looks at the metrics of every step."""

    def __init__(self) -> None:
        self._missing: set[str] = set()

    def saw(self, metrics: Mapping[str, float]) -> None:
        """Warns where a step replayed none of what it was to replay."""
        missing = {name for name in RECORDS if metrics.get(name) == 0.0}
        for name in sorted(missing - self._missing):
            _log.warning(
                "no trained token of this step has %s: it was trained as if nothing were replayed. Let the rollout record it"
                " in its samples, or switch the replay off",
                RECORDS[name],
            )
        self._missing = missing
