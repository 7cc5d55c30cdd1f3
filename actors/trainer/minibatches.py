"""How a batch is split into optimizer steps, and what must stay together.

Invariant: a pure function of the sequences; groups are never split over minibatches, nor pairs over microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.packing import plan_microbatches


def minibatches(sequences: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """At most `count` parts with about as many groups each, in the batch's order; none is empty."""
    groups = list(dict.fromkeys(one.group for one in sequences))
    count = min(count, len(groups))
    part_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    parts: list[list[TrainSequence]] = [[] for _ in range(count)]
    for one in sequences:
        parts[part_of[one.group]].append(one)
    return parts


def pairs(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """(chosen, rejected) side by side for each group that has both: the plan's advantage is above or below 0; others are not
    of a pair."""
    best: dict[int, TrainSequence] = {}
    worst: dict[int, TrainSequence] = {}
    for one in sequences:
        sign = float(one.advantages()[0])
        if sign:
            (best if sign > 0 else worst).setdefault(one.group, one)
    return [one for group in best if group in worst for one in (best[group], worst[group])]


def plan_units(lengths: Sequence[int], unit: int, budget_tokens: int, ranks: int) -> list[list[list[int]]]:
    """As `plan_microbatches`, with every `unit` neighbours in one microbatch; `plan[rank][i]` are indices."""
    totals = [sum(lengths[start : start + unit]) for start in range(0, len(lengths), unit)]
    plan = plan_microbatches(totals, budget_tokens, ranks)
    return [[[unit * one + place for one in micro for place in range(unit)] for micro in of_rank] for of_rank in plan]
