"""Exact match: 1 for the label's four digits, else 0. Nothing is parsed here: the episode already did."""

from __future__ import annotations

from physarum.bus.records import Execution


def exact_match(execution: Execution) -> float:
    """Hook `reward.hook`: the last sample's `answer` against the task's label."""
    return float(execution.samples[-1].outputs.get("answer") == execution.task.label)
