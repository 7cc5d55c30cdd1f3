"""A mask whose length differs from its response after a partial rollout: random aborts, resumptions and hand-overs.

Peers built such samples from pieces whose lengths were kept in several places. Here every path gives what the undisturbed
episode gives: the same tokens, log-probabilities and masks, one to one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.engine_wire import Reply
from physarum.agents.held import check_sampling
from physarum.agents.journal import Journal
from physarum.agents.trajectory import Trajectory
from physarum.bus.codec import decode, encode
from physarum.bus.records import Begun, Sample
from physarum.bus.version import Span

SAMPLING: dict[str, Any] = {"max_new_tokens": 64}


class Interrupted(Exception):
    """The worker drains."""


def token(turn: int, place: int) -> int:
    """What the policy says there, whoever is asked."""
    return 1000 + 100 * turn + place


def piece(turn: int, start: int, count: int, finished: bool, version: int) -> Reply:
    ids = np.array([token(turn, start + place) for place in range(count)], np.int32)
    return Reply(
        token_ids=ids,
        logprobs=(-ids / 4096).astype(np.float32),
        spans=[Span(f"policy@1.{version}", 0, count)] if count else [],
        finish_reason="stop" if finished else "abort",
        cached_tokens=0,
        flaw=None,
    )


def episode(journal: Journal, turns: list[int], cuts: list[int | None], version: int) -> Sample:
    """Generates each turn's tokens; `cuts` takes one entry per request: tokens until an abort (then asked again), or None for
    the rest. The list running out is the worker being told to drain."""
    trajectory = Trajectory([1, 2])
    for turn, length in enumerate(turns):
        held = journal.open(trajectory.token_ids, check_sampling(SAMPLING))
        while not held.finished:
            if not cuts:
                raise Interrupted
            cut, rest = cuts.pop(0), length - held.count
            count = rest if cut is None else min(cut, rest)
            held.add(piece(turn, held.count, count, count == rest, version), "rid")
        trajectory.append_generated(held.generation())
        if turn + 1 < len(turns):
            trajectory.append_environment([9, 9])
    return trajectory.sample()


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)
workers = st.lists(st.lists(st.none() | st.integers(0, 6), max_size=4), max_size=5)


@given(turns=lengths, lives=workers)
def test_whatever_is_interrupted_the_sample_is_that_of_the_undisturbed_episode(
    turns: list[int], lives: list[list[int | None]]
) -> None:
    expected = episode(Journal(), turns, [None] * 100, 0)
    begun: list[Begun] = []
    made: Sample | None = None
    for version, cuts in enumerate([*lives, [None] * 100]):
        journal = Journal(decode(encode(begun), list[Begun]))
        try:
            made = episode(journal, turns, list(cuts), version)
            break
        except Interrupted:
            begun = journal.begun()
    assert made is not None
    assert made.token_ids.tolist() == expected.token_ids.tolist()
    assert made.loss_mask.tolist() == expected.loss_mask.tolist()
    np.testing.assert_array_equal(made.logprobs, expected.logprobs)
    assert made.response_len == len(made.loss_mask) == len(made.logprobs) == made.spans[-1].end
