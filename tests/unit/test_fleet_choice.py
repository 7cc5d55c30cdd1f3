"""Which engine gets a request: versions are never traded, preferences are escaped from when they cost too much."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.fleet.choice import ChoiceRules, EngineView, Wanted, choose
from physarum.agents.fleet.prefixes import BLOCK, KnownPrefixes, prefix_blocks

RULES = ChoiceRules(imbalance=1.25, slack_tokens=1000)
PROMPT = np.arange(4 * BLOCK, dtype=np.int32)

views = st.builds(
    EngineView,
    instance=st.uuids().map(str),
    number=st.none() | st.integers(0, 4),
    room=st.integers(-2, 3),
    work=st.floats(0, 1e5),
    cached=st.integers(0, 4).map(lambda blocks: blocks * BLOCK),
    tie=st.floats(0, 1),
)
constraints = st.fixed_dictionaries({"number": st.none() | st.integers(0, 4), "minimum": st.none() | st.integers(0, 4)})


def wanted(prefers: str = "", **constraint: int | None) -> Wanted:
    return Wanted(tokens=PROMPT, max_new_tokens=16, prefers=prefers, **constraint)


def view(name: str, work: float = 0.0, **changes: object) -> EngineView:
    return EngineView(**({"instance": name, "number": 3, "room": 1, "work": work} | changes))  # type: ignore[arg-type]


def chosen(engines: list[EngineView], want: Wanted) -> str | None:
    found = choose(engines, want, RULES)
    return None if found is None else found.instance


@given(st.lists(views, max_size=8), constraints, st.data())
def test_whatever_is_chosen_fits_has_room_and_is_near_the_lightest(
    engines: list[EngineView], constraint: dict[str, int | None], data: st.DataObject
) -> None:
    prefers = data.draw(st.sampled_from([one.instance for one in engines])) if engines else ""
    want = wanted(prefers, **constraint)
    able = [one for one in engines if one.room > 0 and want.takes(one.number)]
    found = choose(engines, want, RULES)
    assert (found is None) == (not able)
    if found is not None:
        assert found in able
        assert found.work <= min(one.work for one in able) * RULES.imbalance + RULES.slack_tokens


def test_least_work_by_tokens_and_not_by_requests() -> None:
    assert chosen([view("a", 9000, room=50), view("b", 40, room=1)], wanted()) == "b"


def test_a_session_stays_and_escapes_from_saturation_and_from_imbalance() -> None:
    assert chosen([view("a", 900), view("b", 0)], wanted("a")) == "a"
    assert chosen([view("a", 900, room=0), view("b", 0)], wanted("a")) == "b"
    assert chosen([view("a", 1100), view("b", 0)], wanted("a")) == "b"
    assert chosen([view("b", 0)], wanted("a")) == "b", "its engine is gone"


def test_the_longest_shared_prefix_wins_while_it_is_near_and_worth_it() -> None:
    assert chosen([view("a", 900, cached=3 * BLOCK), view("b", 0, cached=2 * BLOCK)], wanted()) == "a"
    assert chosen([view("a", 1100, cached=3 * BLOCK), view("b", 0)], wanted()) == "b"
    assert chosen([view("a", 900, cached=BLOCK), view("b", 0)], wanted()) == "b", "a quarter of the prompt"


def test_exact_and_minimum_versions() -> None:
    engines = [view("old", number=2), view("new", 5000, number=4), view("frozen", number=None)]
    assert chosen(engines, wanted(number=4)) == "new"
    assert chosen(engines, wanted(minimum=3)) == "new"
    assert chosen(engines, wanted(number=3)) is None
    assert "weights 3 or newer" in wanted(minimum=3).versions


def test_equals_are_told_apart_by_the_process_own_tie() -> None:
    assert chosen([view("a", tie=0.9), view("b", tie=0.1)], wanted()) == "b"


tokens = st.lists(st.integers(0, 1), min_size=0, max_size=5).map(
    lambda parts: np.concatenate([np.zeros(0, np.int32), *(np.full(BLOCK, part, np.int32) for part in parts)])
)


@given(st.lists(tokens, max_size=6), tokens, st.integers(0, BLOCK - 1))
def test_the_shared_prefix_is_the_longest_one_that_was_sent(
    sent: list[np.ndarray], prompt: np.ndarray, tail: int
) -> None:
    known = KnownPrefixes(1 << 20)
    known.serve("p@1.0", 1 << 20)
    for one in sent:
        known.add(prefix_blocks(one))
    ragged = np.concatenate([prompt, np.full(tail, 7, np.int32)]).astype(np.int32)
    common = [_common(one, prompt) for one in sent]
    assert known.shared(prefix_blocks(ragged)) == max(common, default=0) // BLOCK * BLOCK


def _common(left: np.ndarray, right: np.ndarray) -> int:
    size = min(len(left), len(right))
    differs = np.nonzero(left[:size] != right[:size])[0]
    return int(differs[0]) if len(differs) else size


def test_known_prefixes_are_bounded_lose_their_ends_first_and_nothing_survives_new_weights() -> None:
    known = KnownPrefixes(4 * BLOCK)
    known.serve("p@1.0", 4 * BLOCK)
    known.add(prefix_blocks(PROMPT))
    other = np.full(2 * BLOCK, 9, np.int32)
    known.add(prefix_blocks(other))
    assert len(known) == 4
    assert known.shared(prefix_blocks(PROMPT)) == 2 * BLOCK
    assert known.shared(prefix_blocks(other)) == 2 * BLOCK
    known.serve("p@1.1", 4 * BLOCK)
    assert known.shared(prefix_blocks(PROMPT)) == 0
