"""Training sequences: lengths that must agree, and the columnar wire form."""

import numpy as np
import pytest

from physarum.actors.trainer.batch import TrainSequence, decode_sequences, encode_sequences
from physarum.actors.trainer.errors import BadSequence


def sequence(tokens: int = 5, prompt: int = 2, response: int = 3, **changes: object) -> TrainSequence:
    fields = {
        "token_ids": np.arange(tokens, dtype=np.int32),
        "prompt_len": prompt,
        "loss_mask": np.array([True, False, True, True][:response]),
        "engine_logprobs": np.array([-1.0, np.nan, -2.0, -3.0][:response], np.float32),
        "advantage": 0.5,
        "execution": 7,
    }
    return TrainSequence(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_wire_form_loses_nothing() -> None:
    per_token = np.array([1.0, 2.0, 3.0], np.float32)
    sequences = [sequence(), sequence(3, 1, 2, execution=8), sequence(advantage=per_token)]
    back = decode_sequences(encode_sequences(sequences))
    for expected, found in zip(sequences, back, strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert (found.prompt_len, found.execution) == (expected.prompt_len, expected.execution)
        assert found.loss_mask.tolist() == expected.loss_mask.tolist()
        np.testing.assert_array_equal(found.engine_logprobs, expected.engine_logprobs)
        assert found.advantages().tolist() == expected.advantages().tolist()


def test_no_sequences_are_a_message_too() -> None:
    assert decode_sequences(encode_sequences([])) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 6}, r"loss_mask is bool \(3,\); expected bool \(4,\)"),
        ({"token_ids": np.arange(5)}, r"token_ids is int64 \(5,\); expected int32"),
        ({"prompt": 0, "tokens": 3}, "3 tokens with a prompt of 0"),
        ({"prompt": 5}, "5 tokens with a prompt of 5"),
        ({"advantage": np.zeros(2, np.float32)}, r"advantage is float32 \(2,\)"),
    ],
)
def test_a_record_with_unequal_lengths_cannot_exist(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BadSequence, match=message):
        sequence(**changes)  # type: ignore[arg-type]


def test_counts() -> None:
    assert (sequence().length, sequence().response_len, sequence().trained_tokens) == (5, 3, 2)
