"""What the engine chose travels in the sample's own body, and a record that does not fit its tokens refuses to exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from physarum.bus.codec import decode, encode
from physarum.bus.engine_choices import KeptTokens
from physarum.bus.errors import CodecError, RecordError
from physarum.bus.records import Execution, Sample, Task, execution_header
from physarum.bus.version import Span


def sample(**changes: Any) -> Sample:
    """Two prompt tokens, three response tokens."""
    values: dict[str, Any] = {
        "token_ids": np.arange(5, dtype=np.int32),
        "prompt_len": 2,
        "loss_mask": np.ones(3, bool),
        "logprobs": np.full(3, -1.0, np.float32),
        "spans": [Span("policy@1.1", 0, 3)],
    }
    return Sample(**(values | changes))


def test_both_records_travel_unchanged_in_the_body_and_add_nothing_to_the_header() -> None:
    experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    kept = KeptTokens.of([[3, 1], [], [2]])
    task = Task(id="s/0/0/0", run="r", source="s", ordinal=0, group="s/0/0", group_size=1, member=0)
    made = Execution(
        id="e",
        task=task,
        samples=[sample(routed_experts=experts, kept_tokens=kept)],
        worker="w",
        started_at=0.0,
        finished_at=1.0,
    )
    back = decode(encode(made), Execution).samples[0]
    assert back.routed_experts is not None and back.kept_tokens is not None
    assert back.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(back.routed_experts, experts)
    assert back.kept_tokens.offsets.tolist() == [0, 2, 2, 3] and back.kept_tokens.ids.tolist() == [3, 1, 2]
    bare = Execution(id="e", task=task, samples=[sample()], worker="w", started_at=0.0, finished_at=1.0)
    assert execution_header(made, "d") == execution_header(bare, "d")


def test_rows_are_taken_in_any_order_and_joined() -> None:
    kept = KeptTokens.of([[5, 6, 7], [], [8], [9, 1]])
    some = kept.take(np.array([3, 1, 0]))
    assert some.offsets.tolist() == [0, 2, 2, 5] and some.ids.tolist() == [9, 1, 5, 6, 7]
    both = KeptTokens.joined([some, KeptTokens.nothing(2), KeptTokens.of([[4]])])
    assert both.offsets.tolist() == [0, 2, 2, 5, 5, 5, 6] and both.ids.tolist() == [9, 1, 5, 6, 7, 4]
    assert KeptTokens.joined([]).rows == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routed_experts": np.zeros((5, 2, 2), np.uint8)}, r"\(5, 2, 2\); expected uint8 or int16 \[4, MoE layers"),
        ({"routed_experts": np.zeros((4, 2), np.uint8)}, r"routed_experts are uint8 \(4, 2\)"),
        ({"routed_experts": np.zeros((4, 2, 2), np.int64)}, "routed_experts are int64"),
        ({"kept_tokens": KeptTokens.of([[1], [2]])}, "kept_tokens have 2 rows; expected 3, one per response token"),
    ],
)
def test_a_record_that_does_not_fit_the_tokens_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        sample(**changes)


@pytest.mark.parametrize(
    ("offsets", "ids", "message"),
    [
        ([0, 2], [1], "from 0 to 2 over 1 ids; expected them to ascend from 0 to 1"),
        ([1, 2], [1, 2], "from 1 to 2 over 2 ids"),
        ([0, 2, 1, 2], [1, 2], "expected them to ascend"),
        ([], [], "offsets none over 0 ids"),
    ],
)
def test_offsets_that_do_not_divide_the_ids_are_refused(offsets: list[int], ids: list[int], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        KeptTokens(np.array(offsets, np.int64), np.array(ids, np.int32))


def test_types_are_refused_and_altered_bytes_are_a_codec_error() -> None:
    with pytest.raises(RecordError, match="offsets int32"):
        KeptTokens(np.zeros(1, np.int32), np.zeros(0, np.int32))
    data = encode(KeptTokens.of([[1, 2], [3]]))
    with pytest.raises(CodecError, match="not a valid KeptTokens"):
        decode(data[:-1], KeptTokens)
