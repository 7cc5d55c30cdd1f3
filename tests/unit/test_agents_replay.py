"""What an update costs is read off a reply: its spans, and how often the engine gave up its KV."""

from __future__ import annotations

import pytest

from physarum.agents.replay import Replay, Tokens
from physarum.bus.version import Span

SPANS = [Span("p@0.1", 0, 10), Span("p@0.2", 10, 40), Span("p@0.3", 40, 50)]
"""Two updates behind a prompt of 100: contexts of 110 and 140."""


@pytest.mark.parametrize(
    ("retractions", "expected"),
    [
        (0, {"in_place": Tokens(2, 250, 0)}),
        (2, {"retracted": Tokens(2, 250, 250)}),
        (3, {"retracted": Tokens(2, 250, 250), "squeezed": Tokens(1, 150, 150)}),
        (1, {"in_place": Tokens(2, 250, 0), "squeezed": Tokens(1, 150, 150)}),
    ],
)
def test_an_update_keeps_or_recomputes_the_context_it_found(retractions: int, expected: dict[str, Tokens]) -> None:
    replay = Replay()
    replay.answered(100, SPANS, retractions)
    assert replay.pop() == expected


def test_an_undisturbed_reply_costs_nothing() -> None:
    replay = Replay()
    replay.answered(100, SPANS[:1], 0)
    replay.answered(100, [], 0)
    assert replay.pop() == {}


def test_what_was_cached_was_not_replayed_and_counts_add_up() -> None:
    replay = Replay()
    replay.continued("aborted", 200, 199)
    replay.continued("aborted", 300, 299)
    replay.continued("moved", 400, 0)
    assert replay.pop() == {"aborted": Tokens(2, 500, 2), "moved": Tokens(1, 400, 400)}
    assert replay.pop() == {}
