"""Says when batch after batch is masked whole: the run uses up its data and learns nothing, and why is found elsewhere.

Invariant: one warning per onset.
"""

from __future__ import annotations

import logging
from typing import Final

from physarum.bus.ledger import StepRecord

_log = logging.getLogger(__name__)

_PATIENCE: Final = 3
"""Batches; one or two are over the bound after an engine was away."""


class AgeAlarm:
    """Looks at every step."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._masked = 0

    def saw(self, record: StepRecord, publishing: str) -> None:
        """`publishing`: what is under way to the engines."""
        whole = record.trained == 0 and record.tokens_masked > 0
        self._masked = self._masked + 1 if whole else 0
        if self._masked == _PATIENCE:
            _log.warning(
                "%d batches in a row are older than age.bound = %d as a whole and train nothing: engines do not take"
                " the versions that are trained. Under way to them: %s. See `actorctl weights ls` and the engines' logs",
                _PATIENCE, self._bound, publishing,
            )  # fmt: skip
