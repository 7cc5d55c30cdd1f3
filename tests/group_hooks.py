"""Group reward hooks for tests of the reward actor."""

from __future__ import annotations

import time

from physarum.bus.records import Execution


def ranked(executions: list[Execution]) -> list[float]:
    """The place of each by the number in its prompt; a group with a member that says so goes wrong."""
    prompts = [str(one.task.prompt) for one in executions]
    if "raise" in prompts:
        raise ValueError("nothing to compare")
    if "short" in prompts:
        return [1.0]
    if "hang" in prompts:
        time.sleep(600)
    values = [float(prompt) for prompt in prompts]
    return [float(sum(other < value for other in values)) for value in values]


def doubled(executions: list[Execution]) -> list[float]:
    """Twice the reward that each brings of its own."""
    return [2.0 * float(one.samples[-1].reward or 0.0) for one in executions]


def own(execution: Execution) -> float:
    if execution.task.prompt == "bad":
        raise ValueError("cannot be scored")
    return float(execution.task.prompt)


def in_order(executions: list[Execution]) -> list[float]:
    """Each member's place among those that were compared; it says nothing, but nobody else could have given it."""
    return [place / len(executions) for place in range(len(executions))]
