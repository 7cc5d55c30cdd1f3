"""Selection bias: whether training prefers short answers. Pure, and as small after a million executions as after one.

Lengths are counted in buckets whose bounds grow by 2 ** (1 / 8) = 9 %, once for what was generated (everything that came,
dropped or not) and once for what was trained; both forget with the same half-life, in executions.
The longest 1 % are the executions above the 99th percentile of what was generated; a share of 1 means that they are
trained as often as they are made, 0 that they never are.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

_PER_OCTAVE: Final = 8
_BUCKETS: Final = 32 * _PER_OCTAVE
"""Up to 2 ** 32 tokens."""
_TAIL: Final = 0.01
_HALVE_AT: Final = 16_384
"""Executions generated after which every count is halved: old ones weigh less and less."""


class _Lengths:
    """Executions, and tokens, by length."""

    def __init__(self) -> None:
        self.executions: npt.NDArray[np.float64] = np.zeros(_BUCKETS)
        self.tokens: npt.NDArray[np.float64] = np.zeros(_BUCKETS)

    def add(self, length: int, tokens: int) -> None:
        self.executions[_bucket(length)] += 1
        self.tokens[_bucket(length)] += tokens

    def halve(self) -> None:
        self.executions /= 2
        self.tokens /= 2

    @property
    def mean(self) -> float:
        return float(self.tokens.sum() / self.executions.sum())


class Selection:
    """Told of every execution that comes and of every one that is trained, with its trainable tokens."""

    def __init__(self) -> None:
        self._generated, self._trained = _Lengths(), _Lengths()
        self._since = 0

    def generated(self, length: int) -> None:
        """An execution came; `length`: tokens that could carry gradient."""
        self._generated.add(length, length)
        self._since += 1
        if self._since == _HALVE_AT:
            self._since = 0
            self._generated.halve()
            self._trained.halve()

    def trained(self, length: int, tokens: int) -> None:
        """An execution of `length` is trained, `tokens` of it with gradient."""
        if tokens:
            self._trained.add(length, tokens)

    def metrics(self) -> dict[str, float]:
        """`length_ratio`: mean tokens with gradient of a trained execution over mean tokens of a generated one.
        `tail_share_samples`, `tail_share_tokens`: share of the longest 1 % in what was trained over their share in what was
        generated, counted in executions and in tokens (those with gradient). Empty before something was trained."""
        if not self._trained.executions.sum() or not self._generated.tokens.sum():
            return {}
        weights = self._tail_weights()
        made, used = self._generated, self._trained
        return {
            "length_ratio": used.mean / made.mean,
            "tail_share_samples": _share(weights, used.executions) / _share(weights, made.executions),
            "tail_share_tokens": _share(weights, used.tokens) / _share(weights, made.tokens),
        }

    def _tail_weights(self) -> npt.NDArray[np.float64]:
        """How much of each bucket belongs to the longest 1 %: 1 above the percentile's bucket, part of it there."""
        counts = self._generated.executions
        above = np.cumsum(counts[::-1])[::-1] - counts
        wanted = _TAIL * counts.sum()
        part = np.divide(wanted - above, counts, out=np.zeros(_BUCKETS), where=counts > 0)
        weights: npt.NDArray[np.float64] = np.where(above >= wanted, 0.0, np.clip(part, 0.0, 1.0))
        weights[counts == 0] = (above < wanted)[counts == 0]
        return weights


def _share(weights: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> float:
    return float((weights * counts).sum() / counts.sum())


def _bucket(length: int) -> int:
    return min(_BUCKETS - 1, round(_PER_OCTAVE * math.log2(length))) if length > 0 else 0
