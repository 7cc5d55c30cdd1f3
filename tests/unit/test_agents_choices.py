"""Records of an engine's choices, narrowed, joined over replies and turns, and padded where nobody reported."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from physarum.actors.errors import UnrecoverableError
from physarum.actors.rollout.choices import routed
from physarum.agents.choices import Capture, cut, extended, kept_rows
from physarum.agents.protocols import Generation
from physarum.agents.trajectory import Trajectory
from physarum.bus.codec import decode, encode
from physarum.bus.engine_choices import KeptTokens
from physarum.bus.records import Sample
from physarum.bus.version import Span

CAPTURE = Capture(layers=(1, 2), total=3, top_k=2, experts=8, nucleus=True)


def encoded(rows: range) -> str:
    """Token t takes in layer l the experts t and l."""
    ids = [[[row, layer] for layer in range(3)] for row in rows]
    return base64.b64encode(np.asarray(ids, "<i4").tobytes()).decode()


def experts(rows: range) -> np.ndarray[Any, Any]:
    found = CAPTURE.experts_of(encoded(rows), len(rows))
    assert found is not None
    return found


def generation(tokens: list[int], start: int, prompt: int, kept: list[list[int]] | None = None) -> Generation:
    """What an engine says of a prompt of `prompt` tokens, its experts from input `start` on."""
    return Generation(
        token_ids=np.array(tokens, np.int32), logprobs=np.full(len(tokens), -0.5, np.float32),
        spans=[Span("p@0.1", 0, len(tokens))], finish_reason="stop", cached_tokens=0, prompt_tokens=prompt,
        started_at=1.0, finished_at=2.0, rid="r", routed_experts=experts(range(start, prompt + len(tokens) - 1)),
        routed_from=start, kept_tokens=None if kept is None else KeptTokens.of(kept),
    )  # fmt: skip


def test_only_layers_with_experts_are_kept_in_one_byte_each() -> None:
    found = experts(range(4))
    assert found.dtype == np.uint8 and found.shape == (4, 2, 2)
    assert found[3].tolist() == [[3, 1], [3, 2]]


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"\0" * 7).decode()])
def test_a_record_of_another_size_is_none(text: str) -> None:
    assert CAPTURE.experts_of(text, 4) is None


def test_a_gap_has_no_record_and_overlaps_keep_the_first() -> None:
    joined = extended(experts(range(2)), 4, experts(range(4, 6)))
    assert joined[:, 0, 0].tolist() == [0, 1, 255, 255, 4, 5]
    assert extended(joined, 1, experts(range(1, 8)))[:, 0, 0].tolist() == [0, 1, 255, 255, 4, 5, 6, 7]
    assert cut(joined, 3)[:, 0, 0].tolist() == [0, 1, 255] and cut(joined, 7)[-1].tolist() == [[255, 255]] * 2


def test_turns_of_a_trajectory_have_every_row_once() -> None:
    """Prompt of 3, 2 generated, 2 of the environment, 2 generated: the second turn reports from where the first one ended."""
    trajectory = Trajectory([0, 1, 2])
    trajectory.append_generated(generation([3, 4], 0, 3, kept=[[3, 9], [4]]))
    trajectory.append_environment([5, 6])
    trajectory.append_generated(generation([7, 8], 4, 7, kept=[[7], [8, 1, 2]]))
    sample = trajectory.sample()
    assert sample.routed_experts is not None and sample.kept_tokens is not None
    assert sample.routed_experts[:, 0, 0].tolist() == list(range(8))
    assert sample.kept_tokens.counts.tolist() == [2, 1, 0, 0, 1, 3]
    again = decode(encode(sample), Sample)
    assert np.array_equal(again.routed_experts, sample.routed_experts)  # type: ignore[arg-type]


def test_a_trajectory_that_ends_with_the_environment_says_nothing_of_its_last_tokens() -> None:
    trajectory = Trajectory([0, 1])
    trajectory.append_generated(generation([2], 0, 2))
    trajectory.append_environment([3, 4])
    sample = trajectory.sample()
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 255, 255]


def test_kept_rows_must_be_one_for_each_token() -> None:
    assert kept_rows([[1], [2, 3]], 3) is None
    found = kept_rows([[1], [2, 3]], 2)
    assert found is not None and found.counts.tolist() == [1, 2]


def test_kept_tokens_are_asked_for_only_where_something_is_cut() -> None:
    assert "return_sampling_mask" not in CAPTURE.asks({"top_p": 1.0, "top_k": -1}, 0)
    for cutting in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert CAPTURE.asks(cutting, 3) == {
            "return_routed_experts": True, "routed_experts_start_len": 3, "return_sampling_mask": True,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "decoder_sparse_step": 2}, (1, 3)),
        ({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "mlp_only_layers": [0]}, (1, 2, 3)),
        ({"n_routed_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4, "first_k_dense_replace": 2}, (2, 3)),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}, (0, 1)),
    ],
)
def test_layers_with_experts_of_an_architecture(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert routed(config).layers == layers


def test_routing_of_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnrecoverableError, match="R3 with a qwen3 model"):
        routed({"model_type": "qwen3", "num_hidden_layers": 2})
