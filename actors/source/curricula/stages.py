"""Stages of training: group size and generation window switch at a version, and rows that are solved are left out.

As in P1 ("Mastering Physics Olympiads with Reinforcement Learning", arXiv 2511.13612): a pass-rate filter keeps problems that
still teach something, and later stages explore with more executions and longer windows.

Invariant: a stage begins with the first task issued after its version was planned; solved rows are a set of intervals, so the
state stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from physarum.agents.protocols import Outcome
from physarum.bus.intervals import IntervalSet


class Stages:
    """`stages`: [{from_version, group_size, max_new_tokens}], ascending, the first from version 0. Rows whose pass rate (mean
    reward of their group) reached `solved` are skipped in later epochs."""

    def __init__(self, seed: int, *, stages: list[dict[str, Any]], solved: float = 1.0) -> None:
        begins = [int(stage["from_version"]) for stage in stages]
        if not stages or begins[0] != 0 or begins != sorted(set(begins)):
            raise ValueError(f"stages begin at versions {begins}; expected ascending ones, the first 0")
        self._stages, self._solved = stages, solved

    def initial(self) -> dict[str, Any]:
        return {"stage": 0, "solved": []}

    def observe(self, state: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The stage of the newest version seen, and the rows solved so far."""
        solved = IntervalSet.of_intervals([tuple(pair) for pair in state["solved"]])
        number = -1
        for one in outcomes:
            number = max(number, one.number)
            if sum(one.rewards) / len(one.rewards) >= self._solved:
                solved.add(one.index)
        reached = [place for place, stage in enumerate(self._stages) if int(stage["from_version"]) <= number]
        stage = max([state["stage"], *reached])
        return {"stage": stage, "solved": [list(pair) for pair in solved.intervals()]}

    def row(self, state: dict[str, Any], epoch: int, index: int, row: dict[str, Any]) -> dict[str, Any] | None:
        return None if any(first <= index < end for first, end in state["solved"]) else row

    def group_size(self, state: dict[str, Any]) -> int | None:
        size = self._stages[state["stage"]].get("group_size")
        return None if size is None else int(size)

    def sampling(self, state: dict[str, Any]) -> Mapping[str, Any]:
        window = self._stages[state["stage"]].get("max_new_tokens")
        return {} if window is None else {"max_new_tokens": int(window)}
