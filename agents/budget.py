"""How many tokens an episode may still generate, over all its requests.

Invariant: a request never begins with more than is left; with nothing left it ends as one that reached its length, so that an
episode ends in order instead of failing. Requests at the same time each begin with what is left then.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from physarum.agents.protocols import Generation


class TokenBudget:
    """`tokens` in all; None: no limit."""

    def __init__(self, tokens: int | None) -> None:
        self._left = tokens

    def within(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """The sampling parameters with max_new_tokens (and the least number, if any) kept within what is left."""
        if self._left is None:
            return sampling
        most = min(sampling["max_new_tokens"], self._left)
        least = {"min_new_tokens": min(sampling["min_new_tokens"], most)} if "min_new_tokens" in sampling else {}
        return {**sampling, "max_new_tokens": most, **least}

    def spend(self, tokens: int) -> None:
        if self._left is not None:
            self._left = max(0, self._left - tokens)

    @property
    def is_spent(self) -> bool:
        return self._left == 0


def nothing_more(prompt: npt.NDArray[np.int32]) -> Generation:
    """What a request gets when the budget is spent: no token, finish_reason "length"."""
    now = time.time()
    return Generation(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        spans=[],
        finish_reason="length",
        cached_tokens=0,
        prompt_tokens=len(prompt),
        started_at=now,
        finished_at=now,
        rid="",
    )
