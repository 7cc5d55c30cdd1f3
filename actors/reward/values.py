"""What a reward hook may return, and how it gets into an execution's samples. A value that is not allowed is named."""

from __future__ import annotations

import math
from typing import Any, Final

from physarum.actors.errors import BadHookResultError
from physarum.bus.records import Execution

EXPECTED: Final = (
    "expected a finite number, a mapping of names to finite numbers, or a list of those with one entry per sample"
)


def apply_reward(execution: Execution, value: Any) -> None:
    """Sets `reward` and `reward_parts` of every sample. Raises BadHookResultError and then changes nothing.

    A number, or a mapping (its values are summed, its parts kept), judges the execution and so all its samples alike.
    """
    samples = execution.samples
    if isinstance(value, list) and len(value) != len(samples):
        raise BadHookResultError(
            f"the reward hook returned a list of {len(value)} entries for an execution of {len(samples)} samples;"
            " expected one entry per sample"
        )
    scores = [_score(one) for one in value] if isinstance(value, list) else [_score(value)] * len(samples)
    for sample, (reward, parts) in zip(samples, scores, strict=True):
        sample.reward, sample.reward_parts = reward, dict(parts)


def _score(value: Any) -> tuple[float, dict[str, float]]:
    """The reward and its named parts."""
    if not isinstance(value, dict):
        return _finite(value, "a value"), {}
    if not value:
        raise BadHookResultError(f"the reward hook returned an empty mapping; {EXPECTED}")
    parts = {_name(name): _finite(part, f"part {name!r}") for name, part in value.items()}
    return _finite(sum(parts.values()), "a sum of parts"), parts


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise BadHookResultError(f"the reward hook named a part {name!r} ({type(name).__name__}); expected text")
    return name


def _finite(value: Any, what: str) -> float:
    """bool counts as 0 or 1."""
    if not isinstance(value, (bool, int, float)):
        raise BadHookResultError(f"the reward hook returned {what} of type {type(value).__name__}; {EXPECTED}")
    if not math.isfinite(value):
        raise BadHookResultError(f"the reward hook returned {what} that is {value}; {EXPECTED}")
    return float(value)
