"""Ids, mask, log-probabilities and spans never differ in length, and only engine tokens are trainable."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.errors import TrajectoryError
from physarum.agents.protocols import Generation
from physarum.agents.trajectory import Trajectory
from physarum.bus.codec import decode, encode
from physarum.bus.records import Sample
from physarum.bus.version import Span, append_span

NAN = float("nan")


def generation(
    ids: list[int], spans: list[Span], *, logprobs: list[float] | None = None, flaws: tuple[str, ...] = ()
) -> Generation:
    return Generation(
        token_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.asarray([-0.5] * len(ids) if logprobs is None else logprobs, dtype=np.float32),
        spans=spans,
        finish_reason="stop",
        cached_tokens=0,
        prompt_tokens=1,
        started_at=10.0,
        finished_at=11.0,
        rid="r",
        flaws=flaws,
    )


def test_two_turns_by_hand() -> None:
    trajectory = Trajectory([1, 2])
    trajectory.append_generated(generation([3, 4], [Span("p@0.1", 0, 1), Span("p@0.2", 1, 2)], logprobs=[-1.0, -2.0]))
    trajectory.append_environment([5, 6, 7])
    trajectory.append_generated(generation([8], [Span("p@0.3", 0, 1)], logprobs=[-3.0]))
    sample = trajectory.sample(outputs={"answer": "x"}, reward=1.0)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sample.token_ids.dtype == np.int32
    assert sample.prompt_len == 2
    assert sample.loss_mask.tolist() == [True, True, False, False, False, True]
    np.testing.assert_array_equal(sample.logprobs, np.asarray([-1, -2, NAN, NAN, NAN, -3], np.float32))
    assert sample.spans == [Span("p@0.1", 0, 1), Span("p@0.2", 1, 5), Span("p@0.3", 5, 6)]
    assert (sample.reward, sample.outputs, sample.trainable) == (1.0, {"answer": "x"}, True)
    assert [(event.kind, event.start, event.end) for event in sample.events] == [("engine", 10.0, 11.0)] * 2


def test_environment_tokens_before_the_first_generation_join_its_first_version() -> None:
    trajectory = Trajectory([1])
    trajectory.append_environment([2, 3])
    trajectory.append_generated(generation([4, 5], [Span("p@0.7", 0, 1), Span("p@0.8", 1, 2)]))
    sample = trajectory.sample()
    assert sample.spans == [Span("p@0.7", 0, 3), Span("p@0.8", 3, 4)]
    assert sample.loss_mask.tolist() == [False, False, True, True]


def test_an_episode_that_ended_before_any_generation_is_all_prompt() -> None:
    trajectory = Trajectory([1])
    trajectory.append_environment([2, 3])
    sample = trajectory.sample(status="aborted")
    assert (sample.prompt_len, sample.response_len, sample.spans, sample.trainable) == (3, 0, [], False)


def test_a_flawed_turn_masks_only_its_own_tokens() -> None:
    trajectory = Trajectory([1])
    trajectory.append_generated(generation([2, 3], [Span("p@0.1", 0, 2)]))
    trajectory.append_generated(
        generation([4, 5], [Span("p@0.1", 0, 2)], logprobs=[NAN, NAN], flaws=("logprobs_count",))
    )
    trajectory.append_generated(generation([6], [Span("p@0.1", 0, 1)]))
    sample = trajectory.sample()
    assert sample.loss_mask.tolist() == [True, True, False, False, True]
    assert sample.outputs == {"flaws": ["logprobs_count"]}
    assert sample.trainable_tokens == 3


@pytest.mark.parametrize(
    "bad",
    [
        generation([1, 2], [Span("p@0.1", 0, 2)], logprobs=[-1.0]),
        generation([1, 2], [Span("p@0.1", 0, 1)]),
        generation([1, 2], [Span("p@0.1", 0, 1), Span("p@0.2", 0, 2)]),
        generation([1, 2], []),
        generation([], [Span("p@0.1", 0, 0)]),
    ],
)
def test_a_refused_append_leaves_the_trajectory_as_it_was(bad: Generation) -> None:
    trajectory = Trajectory([1])
    trajectory.append_generated(generation([9], [Span("p@0.1", 0, 1)]))
    with pytest.raises(TrajectoryError, match="expected"):
        trajectory.append_generated(bad)
    assert trajectory.sample().token_ids.tolist() == [1, 9]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="at least one"):
        Trajectory([])


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    """Sound, partial (aborted, possibly empty) and flawed generations over one to three versions."""
    spans: list[Span] = []
    for version, length in enumerate(draw(st.lists(st.integers(1, 5), max_size=3))):
        append_span(spans, f"p@0.{version}", length)
    count = spans[-1].end if spans else 0
    logprobs = draw(st.lists(st.sampled_from([-0.1, -2.0, NAN]), min_size=count, max_size=count))
    return generation([7] * count, spans, logprobs=logprobs)


@given(st.lists(st.one_of(generations(), st.lists(st.integers(0, 99), max_size=6)), max_size=12))
def test_lengths_stay_equal_under_any_interleaving(steps: list[Generation | list[int]]) -> None:
    trajectory, expected = Trajectory([1, 2]), [1, 2]
    for step in steps:
        if isinstance(step, Generation):
            trajectory.append_generated(step)
            expected += step.token_ids.tolist()
        else:
            trajectory.append_environment(step)
            expected += step
        sample = trajectory.sample(status="truncated")  # the record itself refuses unequal lengths and gaps
        assert sample.token_ids.tolist() == expected
        assert len(sample.loss_mask) == len(sample.logprobs) == sample.response_len
        assert sum(span.end - span.start for span in sample.spans) == sample.response_len
        assert np.isfinite(sample.logprobs[sample.loss_mask]).all()
    assert decode(encode(trajectory.sample()), Sample).token_ids.tolist() == expected
