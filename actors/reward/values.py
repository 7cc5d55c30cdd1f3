"""What a reward hook may return, and how it gets into an execution's samples. A value that is not allowed is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from physarum.actors.errors import BadHookResultError
from physarum.bus.records import Execution, Sample, SampleScore, with_scores

EXPECTED: Final = (
    "expected a finite number, a mapping of names to finite numbers, or a list of those with one entry per sample"
)
TURNS: Final = "turns"
"""The part that is a list: one score per turn of the policy."""


def apply_reward(execution: Execution, value: Any, weights: Mapping[str, float] | None = None) -> None:
    """Sets `reward`, `reward_parts` and `turn_rewards` of every sample. Raises BadHookResultError and then changes nothing.

    A number, or a mapping (its values are summed by `weights`, 1 where none is given; its parts kept), judges the execution
    and so all its samples alike. The part `turns` is a list, one score per turn of the policy; its sum counts as a part.
    """
    samples = execution.samples
    if isinstance(value, list) and len(value) != len(samples):
        raise BadHookResultError(
            f"the reward hook returned a list of {len(value)} entries for an execution of {len(samples)} samples;"
            " expected one entry per sample"
        )
    values = value if isinstance(value, list) else [value] * len(samples)
    scores = [_score(one, weights or {}) for one in values]
    for sample, score in zip(samples, scores, strict=True):
        _check_turns(sample, score)
    with_scores(execution, scores)


def _score(value: Any, weights: Mapping[str, float]) -> SampleScore:
    if not isinstance(value, dict):
        return SampleScore(reward=_finite(value, "a value"))
    if not value:
        raise BadHookResultError(f"the reward hook returned an empty mapping; {EXPECTED}")
    turns = _turns(value[TURNS]) if TURNS in value else []
    parts = {_name(name): _finite(part, f"part {name!r}") for name, part in value.items() if name != TURNS}
    if TURNS in value:
        parts[TURNS] = _finite(sum(turns), "a sum of turns")
    total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
    weighted = [_finite(weights.get(TURNS, 1.0) * turn, "a weighted turn") for turn in turns]
    return SampleScore(reward=_finite(total, "a sum of parts"), parts=parts, turns=weighted)


def _turns(value: Any) -> list[float]:
    if not isinstance(value, list):
        raise BadHookResultError(
            f"the reward hook returned part {TURNS!r} of type {type(value).__name__}; expected a list, one score per turn"
        )
    return [_finite(one, f"the score of turn {turn}") for turn, one in enumerate(value)]


def _check_turns(sample: Sample, score: SampleScore) -> None:
    count = int(sample.turns.max(initial=-1)) + 1
    if score.turns and len(score.turns) != count:
        raise BadHookResultError(
            f"the reward hook returned {len(score.turns)} scores of turns for a sample with {count} turns of the policy;"
            " expected one per turn"
        )


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
