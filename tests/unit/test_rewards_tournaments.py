"""Tournament rewards land on the members that earned them: rank correlation with a perfect judge, for every format.

Two perfect judges: one says only who is better, the other by how much. Only the full round robin ranks everybody right by the
first, but every format comes to 0.9 on average; what each gives is stated in docs/rewards.md.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from physarum.agents.rewards.tournaments.formats import FORMATS, Standing
from physarum.agents.rewards.tournaments.matches import Judge, Table, in_both_orders, scores

Floats = npt.NDArray[np.float64]


def ranks(values: Any) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    order = np.empty(len(array))
    order[np.argsort(array, kind="stable")] = np.arange(len(array))
    return np.array([order[array == value].mean() for value in array])


def spearman(one: Any, other: Any) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def says_who(quality: list[int]) -> Judge:
    async def judge(one: int, other: int) -> float:
        return float(quality[one] > quality[other])

    return judge


def says_how_much(quality: list[int]) -> Judge:
    async def judge(one: int, other: int) -> float:
        return 0.5 + (quality[one] - quality[other]) / (2 * len(quality))

    return judge


def correlations(
    name: str, make: Callable[[list[int]], Judge], members: int, draws: int, **options: Any
) -> list[float]:
    found = []
    for seed in range(draws):
        rng = random.Random(seed)
        quality = rng.sample(range(members), members)
        standing: Standing = asyncio.run(FORMATS[name](members, make(quality), rng, **options))
        found.append(spearman(standing.scores, quality))
    return found


SIZES = (4, 7, 8, 16, 64)


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_judge_that_says_how_much_is_followed_by_every_format(name: str) -> None:
    for members in SIZES:
        assert min(correlations(name, says_how_much, members, draws=4)) >= 0.9


@pytest.mark.parametrize("name", list(FORMATS))
def test_a_judge_that_only_says_who_is_followed_by_every_format_on_average(name: str) -> None:
    for members in SIZES:
        draws = 2 if name == "round_robin" else 24
        assert np.mean(correlations(name, says_who, members, draws)) >= 0.9


def test_a_single_elimination_with_one_anchor_ranks_coarsely() -> None:
    """Why it has three: half of the members lose in the first round, and nothing more is known of them than to whom."""
    for members in (16, 64):
        assert np.mean(correlations("single_elimination", says_who, members, draws=12, anchors=1)) < 0.9


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("members", [2, 3, 16])
def test_the_best_member_comes_first_and_the_number_of_comparisons_is_as_stated(name: str, members: int) -> None:
    quality = random.Random(7).sample(range(members), members)
    standing: Standing = asyncio.run(FORMATS[name](members, says_who(quality), random.Random(1)))
    anchors = min(3, members)
    everybody = members * (members - 1) // 2
    most = {
        "anchor": anchors * (members - anchors) + anchors * (anchors - 1) // 2,
        "round_robin": everybody,
        "single_elimination": 4 * (members - 1),
        "double_elimination": 3 * members,
        "swiss": (math.ceil(math.log2(members)) + 2) * (members // 2),
    }
    assert standing.comparisons <= min(everybody, most[name])
    if name in ("round_robin", "swiss", "single_elimination", "double_elimination"):
        assert standing.scores[quality.index(members - 1)] == 1.0


def test_a_round_robin_is_exactly_the_order() -> None:
    quality = [3, 0, 2, 1]
    standing = asyncio.run(FORMATS["round_robin"](4, says_who(quality), random.Random(0)))
    assert standing.scores == [1.0, 0.0, 2 / 3, 1 / 3]


@given(st.sampled_from(list(FORMATS)), st.integers(2, 12), st.integers(0, 99), st.randoms())
@settings(max_examples=80, deadline=None)
def test_any_judge_gives_scores_that_sum_to_half_and_no_pair_meets_twice(
    name: str, members: int, seed: int, chance: random.Random
) -> None:
    asked: set[frozenset[int]] = set()

    async def judge(one: int, other: int) -> float | None:
        assert one != other and frozenset((one, other)) not in asked
        asked.add(frozenset((one, other)))
        return chance.choice([None, 0.0, 0.25, 0.5, 1.0])

    standing: Standing = asyncio.run(FORMATS[name](members, judge, random.Random(seed)))
    assert len(standing.scores) == members
    assert all(0.0 <= score <= 1.0 for score in standing.scores)
    assert sum(standing.scores) == pytest.approx(members / 2)
    assert standing.comparisons == len(asked)


@pytest.mark.parametrize("says", [None, 0.5])
@pytest.mark.parametrize("members", [2, 4, 5, 16])
@pytest.mark.parametrize("name", list(FORMATS))
def test_a_judge_that_cannot_tell_puts_nobody_above_another(name: str, members: int, says: float | None) -> None:
    async def undecided(one: int, other: int) -> float | None:
        return says

    assert asyncio.run(FORMATS[name](members, undecided, random.Random(0))).scores == [0.5] * members


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["single_elimination", "double_elimination"])
def test_who_left_by_lot_shares_the_place_of_who_played_on(name: str, seed: int) -> None:
    """Two best answers that the judge finds equal are both first, and no worse one is between them."""
    worth = random.Random(seed).sample([9, 9, 3, 2, 1], 5)

    async def judge(one: int, other: int) -> float:
        return 0.5 if worth[one] == worth[other] else float(worth[one] > worth[other])

    made = asyncio.run(FORMATS[name](5, judge, random.Random(seed), anchors=0)).scores
    assert {score for score, value in zip(made, worth, strict=True) if value == 9} == {0.875}


async def test_an_abstention_is_no_draw() -> None:
    async def judge(one: int, other: int) -> float | None:
        return None if {one, other} == {0, 1} else float(one < other)

    table = Table(3, judge)
    await table.play([(0, 1), (0, 2), (1, 2)])
    assert table.played == {(0, 2): 1.0, (1, 2): 1.0}
    assert table.outcome(0, 1) is None and table.outcome(2, 0) == 0.0


async def test_who_is_shown_first_wins_nothing_in_both_orders() -> None:
    async def first_wins(one: int, other: int) -> float:
        return 1.0

    assert await in_both_orders(first_wins)(0, 1) == 0.5


@pytest.mark.parametrize("outcome", [1.5, -0.1, math.nan])
async def test_an_outcome_outside_its_range_is_named(outcome: float) -> None:
    async def judge(one: int, other: int) -> float:
        return outcome

    with pytest.raises(ValueError, match=r"for members 0 and 1; expected a number in \[0, 1\]"):
        await Table(2, judge).play([(0, 1)])


def test_ties_share_the_mean_of_their_places() -> None:
    assert scores([(1.0,), (0.0,), (1.0,), (2.0,)]) == [0.5, 0.0, 0.5, 1.0]


def test_a_group_of_one_has_nobody_to_be_compared_with() -> None:
    with pytest.raises(ValueError, match="nobody to compare with"):
        asyncio.run(FORMATS["swiss"](1, says_who([0]), random.Random(0)))
