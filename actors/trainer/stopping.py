"""When training ends: the first condition of `stop:` that is met, by name."""

from __future__ import annotations

from collections import deque
from typing import Final

from physarum.bus.ledger import StepRecord
from physarum.configs.root import RootConfig
from physarum.configs.stop import StopConfig

_WINDOW: Final = 5
"""Loss and reward conditions look at the mean of this many steps: one lucky batch does not end a run."""


class StopRule:
    """Told of each step; asked before the next."""

    def __init__(self, config: StopConfig | None, trained: int = 0) -> None:
        """`trained`: executions that were trained before, by steps that are not told here. Without `config` no condition is
        ever met: of a further policy, which ends with the run's own (leader.py)."""
        self._config = config
        self._trained = trained
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._rewards: deque[float] = deque(maxlen=_WINDOW)
        self._trained_s = 0.0

    def saw(self, step: StepRecord, trained_s: float) -> None:
        self._trained_s = trained_s
        self._trained += step.trained
        if "loss" in step.metrics:
            self._losses.append(step.metrics["loss"])
        if step.reward_mean is not None:
            self._rewards.append(step.reward_mean)

    def met(self, number: int) -> str | None:
        """The condition that is met after `number` weight-changing steps, or None."""
        config = self._config
        if config is None:
            return None
        if config.steps is not None and number >= config.steps:
            return f"stop.steps = {config.steps}"
        if config.samples is not None and self._trained >= config.samples:
            return f"stop.samples = {config.samples}"
        if config.time_s is not None and self._trained_s >= config.time_s:
            return f"stop.time_s = {config.time_s:g}"
        if config.loss_below is not None and _mean(self._losses) < config.loss_below:
            return f"stop.loss_below = {config.loss_below:g}"
        if config.reward_above is not None and -_mean(self._rewards, -1.0) > config.reward_above:
            return f"stop.reward_above = {config.reward_above:g}"
        return None


def exhausted_reason(config: RootConfig) -> str:
    """Why a run whose source has nothing more ends."""
    if config.samples.recorded:
        return "the recorded samples are exhausted"
    if config.stop.epochs is not None and config.stop.epochs == config.epochs:
        return f"stop.epochs = {config.stop.epochs}"
    return f"the source is exhausted (source.epochs = {config.epochs})"


def _mean(values: deque[float], sign: float = 1.0) -> float:
    """sign * mean of a full window; infinity while the window is not full, so that no condition is met."""
    return sign * sum(values) / len(values) if len(values) == _WINDOW else float("inf")
