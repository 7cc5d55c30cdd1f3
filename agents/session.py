"""What the requests of one episode have in common, beside what their client has of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from physarum.agents.choices import Capture
from physarum.agents.protocols import Generation


class Session:
    """Which engine served an episode last: the next request prefers it. One for each episode, shared by its requests."""

    def __init__(self, resumed: bool = False) -> None:
        self.engine = ""
        self.resumed = resumed
        self._routed = np.zeros(0, np.int32)

    def routed_from(self, prompt: npt.NDArray[np.int32]) -> int:
        """The first input of `prompt` [P] whose experts were not reported with the request before, where the prompt goes on
        behind that; else 0. So a history of n turns is not reported n times."""
        known = self._routed
        goes_on = 0 < len(known) <= len(prompt) and np.array_equal(prompt[: len(known)], known)
        return len(known) - 1 if goes_on else 0

    def reported(self, prompt: npt.NDArray[np.int32], made: Generation) -> None:
        """`made` was asked of `prompt`."""
        if made.routed_experts is not None:
            self._routed = np.concatenate([prompt, made.token_ids])


class LiveSampling:
    """What was changed of the run's sampling while it goes on; requests that begin take it, those in flight do not."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = {}


class EngineChoices(NamedTuple):
    """`capture`: what engines report besides tokens. `temperature`: the trainer's; tokens drawn at another one have no
    log-probabilities that it could compare its own with, and are not trained. `seed`: the base of every request's own."""

    capture: Capture | None = None
    temperature: float | None = None
    seed: int | None = None
