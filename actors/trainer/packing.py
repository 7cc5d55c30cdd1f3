"""Which sequences share a microbatch, and which data-parallel rank computes it.

Invariant: a pure function of the lengths: every rank derives the same plan without talking; each sequence is in exactly
one microbatch, no microbatch exceeds the token budget, and every rank has the same number of microbatches.
"""

import heapq
from collections.abc import Sequence
from typing import TypeAlias

from physarum.actors.trainer.errors import SequenceTooLong

Microbatch: TypeAlias = list[int]
"""Indices of sequences, longest first (neighbours of like length share one attention call). May be empty."""


def plan_microbatches(lengths: Sequence[int], budget_tokens: int, ranks: int = 1) -> list[list[Microbatch]]:
    """Microbatches per data-parallel rank: `plan[rank][i]`, the same count for every rank.

    Longest-processing-time greedy (Graham 1969): sequences in descending length, each to the emptiest microbatch, so
    that tokens are balanced within 4/3 of the optimum; one more microbatch per rank is added until all fit.
    The i-th microbatches of all ranks are of like size, so lockstep collectives within them wait little.
    Raises SequenceTooLong for a sequence above the budget, before anything is packed.
    """
    for index, length in enumerate(lengths):
        if length > budget_tokens:
            raise SequenceTooLong(index, length, budget_tokens)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rounds = max(1, -(-sum(lengths) // (budget_tokens * ranks)))
    while (bins := _fill(order, lengths, budget_tokens, rounds * ranks)) is None:
        rounds += 1
    bins.sort(key=lambda microbatch: (-sum(lengths[index] for index in microbatch), microbatch))
    return [bins[rank::ranks] for rank in range(ranks)]


def _fill(order: list[int], lengths: Sequence[int], budget_tokens: int, count: int) -> list[Microbatch] | None:
    """Greedy into `count` bins; None if one does not fit the emptiest (then it fits no other either)."""
    bins: list[Microbatch] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in order:
        filled, number = heap[0]
        if filled + lengths[index] > budget_tokens:
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (filled + lengths[index], number))
    return bins
