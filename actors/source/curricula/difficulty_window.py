"""Adaptive difficulty per environment: a window of levels that moves up when its top level is mastered.

RLVE, "Scaling Up Reinforcement Learning for Language Models with Adaptive Verifiable Environments" (arXiv 2511.07317): levels
are drawn uniformly from [low, high]; once the accuracy on level `high` reaches the threshold over enough groups, `high` grows
by one, and `low` follows `width` levels behind. Only outcomes at the present top count.

Invariant: environment and level of a place (epoch, index) are a function of the seed and the state alone, so that an outcome
is credited to what was really asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from physarum.agents.protocols import Outcome
from physarum.configs.hooks import load_hook


class Places:
    """Source hook for it: `size` places per epoch, which the curriculum fills."""

    def __init__(self, seed: int, *, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return {"prompt": "", "metadata": {}}


class DifficultyWindow:
    """`environments`: name -> hook (level, seed) -> row (prompt, label, metadata). Places take them in turn."""

    def __init__(
        self,
        seed: int,
        *,
        environments: dict[str, str],
        threshold: float = 0.9,
        groups: int = 8,
        width: int = 4,
        start: int = 0,
    ) -> None:
        self._seed, self._threshold, self._groups, self._width, self._start = seed, threshold, groups, width, start
        self._names = sorted(environments)
        self._generate: dict[str, Any] = {name: load_hook(hook) for name, hook in environments.items()}

    def initial(self) -> dict[str, Any]:
        return {name: self._window(self._start) for name in self._names}

    def observe(self, state: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Counts groups at the top level; a window that was judged begins to count anew."""
        found = {name: dict(window) for name, window in state.items()}
        for one in outcomes:
            name, level = self._drawn(one.state, one.epoch, one.index)
            window = found[name]
            if level != window["high"]:
                continue
            window["seen"] += 1
            window["right"] += sum(one.rewards) / len(one.rewards)
            if window["seen"] >= self._groups:
                mastered = window["right"] / window["seen"] >= self._threshold
                found[name] = self._window(window["high"] + mastered)
        return found

    def row(self, state: dict[str, Any], epoch: int, index: int, row: dict[str, Any]) -> dict[str, Any]:
        """A problem of the place's environment and level."""
        name, level = self._drawn(state, epoch, index)
        made: dict[str, Any] = self._generate[name](level, _hash(self._seed, name, epoch, index))
        return {**made, "metadata": {**(made.get("metadata") or {}), "environment": name, "level": level}}

    def group_size(self, state: dict[str, Any]) -> int | None:
        return None

    def sampling(self, state: dict[str, Any]) -> Mapping[str, Any]:
        return {}

    def _window(self, high: int) -> dict[str, Any]:
        return {"high": high, "seen": 0, "right": 0.0}

    def _drawn(self, state: dict[str, Any], epoch: int, index: int) -> tuple[str, int]:
        name = self._names[index % len(self._names)]
        high = int(state[name]["high"])
        low = max(self._start, high - self._width + 1)
        return name, low + _hash(self._seed, "level", epoch, index) % (high - low + 1)


def _hash(*parts: Any) -> int:
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())
