"""What was played, and the ranking that follows from it.

Invariant: every outcome is stored under the pair it belongs to, once per match, so a score can only reach the member that
earned it. A judge that abstains leaves no match: that counts for neither side, and is not a draw.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterable, Sequence
from typing import Protocol

import numpy as np

Pair = tuple[int, int]


class Judge(Protocol):
    """How well `one` did against `other`: 1 won, 0 lost, 0.5 a draw, between them a margin; None where it cannot tell."""

    def __call__(self, one: int, other: int) -> Awaitable[float | None]: ...


def in_both_orders(judge: Judge) -> Judge:
    """The mean over both orders of presentation: a judge that prefers whom it sees first prefers nobody. Twice the cost."""

    async def both(one: int, other: int) -> float | None:
        first, second = await asyncio.gather(judge(one, other), judge(other, one))
        return None if first is None or second is None else (first + 1.0 - second) / 2.0

    return both


class Table:
    """The matches of `members` (numbered from 0), asked of `judge`."""

    def __init__(self, members: int, judge: Judge) -> None:
        """Raises ValueError for less than two members."""
        if members < 2:
            raise ValueError(f"a tournament of {members} members; expected at least 2: there is nobody to compare with")
        self.members = members
        self._judge = judge
        self.comparisons = 0
        self.played: dict[Pair, float] = {}
        """Outcome of the first of each pair."""
        self._asked: set[Pair] = set()

    async def play(self, pairs: Iterable[Pair]) -> None:
        """Has pairs compared, all at once; those that met before are not asked again. Raises ValueError for an outcome outside
        [0, 1], and what the judge raises."""
        new = [(one, other) for one, other in dict.fromkeys(pairs) if not self.met(one, other)]
        self._asked.update(new)
        self.comparisons += len(new)
        async with asyncio.TaskGroup() as group:
            asked = {pair: group.create_task(_awaited(self._judge(*pair))) for pair in new}
        for pair, task in asked.items():
            if (outcome := task.result()) is not None:
                self.played[pair] = _checked(outcome, pair)

    def met(self, one: int, other: int) -> bool:
        """Whether the judge was asked about them, in either order; what it could not tell, it is not asked again."""
        return (one, other) in self._asked or (other, one) in self._asked

    def outcome(self, one: int, other: int) -> float | None:
        """What `one` scored against `other`; None where they have not met, or the judge could not tell."""
        if (one, other) in self.played:
            return self.played[one, other]
        return 1.0 - self.played[other, one] if (other, one) in self.played else None

    def ratings(self) -> list[float]:
        """Colley's ratings [members], 0.5 on average: (2 I + L) r = 1 + (wins - losses) / 2, where L is the Laplacian of who
        met whom (Colley 2002, "Colley's bias free college football ranking method"). A win over a strong member counts
        for more than one over a weak one; who met nobody has 0.5."""
        matrix, wins = 2.0 * np.eye(self.members), np.ones(self.members)
        for (one, other), outcome in self.played.items():
            matrix[one, one] += 1
            matrix[other, other] += 1
            matrix[one, other] -= 1
            matrix[other, one] -= 1
            wins[one] += outcome - 0.5
            wins[other] += 0.5 - outcome
        made: list[float] = np.linalg.solve(matrix, wins).tolist()
        return made


def scores(keys: Sequence[tuple[float, ...]]) -> list[float]:
    """Places as scores in [0, 1]: the best key has 1, the worst 0, equal keys share the mean of their places."""
    rounded = [tuple(round(part, 9) for part in key) for key in keys]
    order = sorted(range(len(keys)), key=lambda member: rounded[member])
    made = [0.0] * len(keys)
    place = 0
    while place < len(order):
        tied = [member for member in order[place:] if rounded[member] == rounded[order[place]]]
        for member in tied:
            made[member] = (place + (len(tied) - 1) / 2) / (len(keys) - 1)
        place += len(tied)
    return made


async def _awaited(outcome: Awaitable[float | None]) -> float | None:
    return await outcome


def _checked(outcome: float, pair: Pair) -> float:
    if not (math.isfinite(outcome) and 0.0 <= outcome <= 1.0):
        raise ValueError(f"the judge gave {outcome} for members {pair[0]} and {pair[1]}; expected a number in [0, 1]")
    return float(outcome)
