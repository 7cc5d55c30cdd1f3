"""Which members meet. Every format asks few enough comparisons to be worth it, and says how many: n members,

    anchor               k (n - k) + k (k - 1) / 2   everybody against k anchors
    round robin          n (n - 1) / 2               everybody against everybody
    single elimination   n - 1, and the anchors' rounds for the seeds
    double elimination   2 n - 2 or 2 n - 1, and an anchor's round for the seeds
    Swiss                up to n / 2 in each round, equals against equals

Invariant: a result holds one score in [0, 1] per member, in the members' order (matches.scores). Lots decide who meets whom,
and who plays on where a match was not decided; they place nobody above another.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from physarum.agents.rewards.tournaments.matches import Judge, Pair, Table, scores


@dataclass(frozen=True, slots=True)
class Standing:
    """`scores` [n]: 1 for the first place, 0 for the last, the mean of their places for members that tie."""

    scores: list[float]
    comparisons: int


async def anchor(members: int, judge: Judge, rng: random.Random, anchors: int = 3) -> Standing:
    """Everybody against `anchors` members. One anchor and a judge that only says who won make two classes; a judge that gives
    margins, or more anchors, tell more apart."""
    table = Table(members, judge)
    await _against_anchors(table, rng, anchors)
    return Standing(scores([(rating,) for rating in table.ratings()]), table.comparisons)


async def round_robin(members: int, judge: Judge, rng: random.Random) -> Standing:
    """Everybody against everybody, who is shown first by lot."""
    table = Table(members, judge)
    pairs = [(one, other) for one in range(members) for other in range(one)]
    await table.play(pair if rng.random() < 0.5 else pair[::-1] for pair in pairs)
    return Standing(scores([(rating,) for rating in table.ratings()]), table.comparisons)


async def single_elimination(members: int, judge: Judge, rng: random.Random, anchors: int = 3) -> Standing:
    """Who loses is out. Places follow from the round, and within it from the ratings of all matches: half of the members
    lose in the first one, so with fewer anchors the order of these is hardly known."""
    return await _elimination(members, judge, rng, lives=1, anchors=anchors)


async def double_elimination(members: int, judge: Judge, rng: random.Random, anchors: int = 1) -> Standing:
    """Who loses twice is out; those with one loss play each other."""
    return await _elimination(members, judge, rng, lives=2, anchors=anchors)


async def swiss(members: int, judge: Judge, rng: random.Random, rounds: int | None = None) -> Standing:
    """Each round pairs members of like rating that have not met. `rounds` defaults to ceil(log2 n) + 2."""
    table = Table(members, judge)
    lots = rng.sample(range(members), members)
    count = math.ceil(math.log2(members)) + 2 if rounds is None else rounds
    for _ in range(min(count, members - 1)):
        ratings = table.ratings()
        order = sorted(range(members), key=lambda member: (-round(ratings[member], 9), lots[member]))
        await table.play(_neighbours(order, table))
    return Standing(scores([(rating,) for rating in table.ratings()]), table.comparisons)


async def _against_anchors(table: Table, rng: random.Random, anchors: int) -> None:
    """One anchor after the other, drawn by lot from the largest class that those before it could not tell apart."""
    drawn: list[int] = []
    while len(drawn) < min(anchors, table.members):
        classes: dict[float, list[int]] = defaultdict(list)
        ratings = table.ratings()
        for member in range(table.members):
            if member not in drawn:
                classes[round(ratings[member], 9)].append(member)
        one = rng.choice(max(classes.values(), key=len))
        await table.play((one, other) for other in range(table.members) if other != one)
        drawn.append(one)


def _neighbours(order: list[int], table: Table) -> list[Pair]:
    """Each member with the next one below that it has not met; who finds nobody, or is left over, pauses."""
    free, pairs = list(order), []
    while free:
        one = free.pop(0)
        other = next((other for other in free if not table.met(one, other)), None)
        if other is not None:
            free.remove(other)
            pairs.append((one, other))
    return pairs


async def _elimination(members: int, judge: Judge, rng: random.Random, *, lives: int, anchors: int) -> Standing:
    table = Table(members, judge)
    await _against_anchors(table, rng, anchors)
    seeds = table.ratings()
    lots = rng.sample(range(members), members)
    strength = sorted(range(members), key=lambda member: (-round(seeds[member], 9), lots[member]))
    exits = await _knocked_out(table, strength, seeds, lives)
    ratings = table.ratings()
    keys = [_key(member, exits, ratings) for member in range(members)]
    return Standing(scores(keys), table.comparisons)


@dataclass(frozen=True, slots=True)
class _Exit:
    """How a member left: in which round, and who played on in its place where the match was not decided."""

    number: int
    heir: int | None = None


def _key(member: int, exits: dict[int, _Exit], ratings: list[float]) -> tuple[float, float]:
    """By which members are placed. Who left undecided is as good as who played on in its place: it shares that one's."""
    while (heir := exits[member].heir) is not None:
        member = heir
    return float(exits[member].number), ratings[member]


async def _knocked_out(table: Table, strength: list[int], seeds: list[float], lives: int) -> dict[int, _Exit]:
    """How each member left; the last one in the highest round. `strength`: members, strongest of `seeds` first."""
    lost, left, number = dict.fromkeys(strength, 0), {}, 0
    while len(lost) > 1:
        number += 1
        pools = [[member for member in strength if lost.get(member) == losses] for losses in range(lives)]
        pairs = [pair for pool in pools for pair in _best_and_worst(pool)]
        if not pairs:  # one in each pool: the finals
            pairs = [(pool[0], other[0]) for pool, other in itertools.pairwise(pools) if pool and other]
        await table.play(pairs)
        for pair in pairs:
            winner, loser, decided = _played(pair, table, strength, seeds)
            lost[loser] += 1
            if lost[loser] == lives:
                del lost[loser]
                left[loser] = _Exit(number, None if decided else winner)
    return {**left, next(iter(lost)): _Exit(number + 1)}


def _best_and_worst(pool: list[int]) -> list[Pair]:
    """The strongest against the weakest, and so on; of an odd number the middle one pauses."""
    return [(pool[place], pool[-1 - place]) for place in range(len(pool) // 2)]


def _played(pair: Pair, table: Table, strength: list[int], seeds: list[float]) -> tuple[int, int, bool]:
    """Winner, loser, and whether that is decided. Of a draw, or where the judge could not tell, the stronger seed plays on, and
    where it could not tell that decides: an answer that gets no verdict out of it earns no other one's place."""
    outcome = table.outcome(*pair)
    if outcome is None or outcome == 0.5:
        winner, loser = sorted(pair, key=strength.index)
        return winner, loser, outcome is None and round(seeds[winner], 9) != round(seeds[loser], 9)
    return (*pair, True) if outcome > 0.5 else (*pair[::-1], True)


Format = Callable[..., Awaitable[Standing]]
FORMATS: Final[dict[str, Format]] = {
    "anchor": anchor,
    "round_robin": round_robin,
    "single_elimination": single_elimination,
    "double_elimination": double_elimination,
    "swiss": swiss,
}
