"""A record that breaks its invariant refuses to exist and says which one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from physarum.bus.errors import RecordError
from physarum.bus.records import Execution, Sample, Task, execution_header, sample_header
from physarum.bus.version import Span


def make(**changes: Any) -> Sample:
    """Two prompt tokens, four response tokens; the third is the environment's."""
    values: dict[str, Any] = {
        "token_ids": np.arange(6, dtype=np.int32),
        "prompt_len": 2,
        "loss_mask": np.array([True, True, False, True]),
        "logprobs": np.array([-1.0, -2.0, np.nan, -3.0], np.float32),
        "spans": [Span("policy@1.1", 0, 2), Span("policy@1.2", 2, 4)],
    }
    return Sample(**(values | changes))


def make_execution(*samples: Sample) -> Execution:
    task = Task(
        id="s/0/7/1", run="r", source="s", group="s/0/7", ordinal=29, group_size=4, member=1, attempt=2, tenant="t"
    )
    return Execution(id="e", task=task, samples=list(samples), worker="rollout-0", started_at=1.0, finished_at=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_len": 0}, "prompt_len is 0 of 6 tokens; expected at least one prompt token"),
        ({"prompt_len": 7}, "prompt_len is 7 of 6 tokens"),
        ({"token_ids": np.zeros((2, 3), np.int32)}, r"token_ids have shape \(2, 3\); expected one dimension"),
        ({"loss_mask": np.ones(3, bool)}, r"loss_mask has shape \(3,\); expected \(4,\)"),
        ({"logprobs": np.zeros(5, np.float32)}, r"logprobs has shape \(5,\); expected \(4,\)"),
        ({"loss_mask": np.ones(4, np.int8)}, "loss_mask int8; expected integers and bool"),
        ({"token_ids": np.zeros(6, np.float32)}, "token_ids are float32"),
        ({"logprobs": np.zeros(4, np.int64)}, "logprobs are int64; expected float32"),
        (
            {"logprobs": np.array([-1.0, np.nan, np.nan, -np.inf], np.float32)},
            r"response token 1 is trainable but has no engine log-probability \(2 such tokens\); mask it",
        ),
        ({"spans": []}, "spans cover 0 tokens of a response of 4"),
        ({"spans": [Span("policy@1.1", 0, 3)]}, "spans cover 3 tokens of a response of 4"),
        ({"spans": [Span("policy@1.1", 1, 4)]}, "does not continue at token 0"),
        ({"spans": [Span("policy@1.1", 0, 3), Span("policy@1.2", 2, 4)]}, "does not continue at token 3"),
        ({"spans": [Span("policy@1.1", 0, 0), Span("policy@1.2", 0, 4)]}, "does not continue at token 0"),
    ],
)
def test_a_sample_that_breaks_an_invariant_is_refused_with_what_was_found(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        make(**changes)


def test_a_sample_that_is_not_trainable_may_lack_log_probabilities() -> None:
    sample = make(trainable=False, logprobs=np.full(4, np.nan, np.float32))
    assert sample.trainable_tokens == 0


def test_a_demonstration_has_neither_log_probabilities_nor_spans() -> None:
    sample = make(origin="demonstration", logprobs=np.full(4, np.nan, np.float32), spans=[])
    assert sample.trainable_tokens == 3


def test_an_empty_response_is_a_sample_without_trainable_token() -> None:
    sample = make(prompt_len=6, loss_mask=np.zeros(0, bool), logprobs=np.zeros(0, np.float32), spans=[])
    assert (sample.response_len, sample.trainable_tokens) == (0, 0)


def test_an_execution_without_sample_is_refused() -> None:
    with pytest.raises(RecordError, match="execution e of task s/0/7/1 holds no sample; a failed one is redelivered"):
        make_execution()


def test_the_header_counts_what_the_planner_needs() -> None:
    header = execution_header(make_execution(make(reward=0.5), make(trainable=False)), digest="d")
    assert (header.task, header.group, header.group_size, header.member, header.attempt) == (
        "s/0/7/1",
        "s/0/7",
        4,
        1,
        2,
    )
    assert (header.tenant, header.digest, header.tokens, header.trainable) == ("t", "d", 12, 3)
    assert header.samples[0].span_trainable == [2, 1]  # mask TT|FT
    assert header.samples[1].span_trainable == [0, 0] and header.samples[1].trainable == 0
    assert sample_header(make(reward=0.5)) == header.samples[0]
