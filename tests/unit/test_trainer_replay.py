"""What a batch takes along of the engine's choices: checked against the model, and left out where nothing replays it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from physarum.actors.trainer.algorithm_settings import Replay
from physarum.actors.trainer.batch import TrainSequence, decode_sequences, encode_sequences
from physarum.actors.trainer.errors import BadSequence
from physarum.actors.trainer.megatron.routing import Routing, moe_layers
from physarum.actors.trainer.replay import replay_metrics, replayed
from physarum.bus.engine_choices import KeptTokens

MODEL = cast("Routing", SimpleNamespace(layers=2, top_k=2, experts=4))
EXPERTS = np.tile(np.array([[0, 1], [3, 2]], np.int16), (4, 1, 1))
"""[4 of 5 tokens, 2 layers, top-2]."""
KEPT = KeptTokens.of([[4, 1], [], [2]])
R3 = Replay(routing="R3", nucleus=True)


def sequence(**changes: Any) -> TrainSequence:
    """Two prompt tokens, three response tokens, the second the environment's."""
    fields: dict[str, Any] = {
        "token_ids": np.arange(5, dtype=np.int32),
        "prompt_len": 2,
        "loss_mask": np.array([True, False, True]),
        "engine_logprobs": np.full(3, -1.0, np.float32),
        "advantage": 1.0,
        "execution": 0,
        "routed_experts": EXPERTS,
        "kept_tokens": KEPT,
    }
    return TrainSequence(**(fields | changes))


def test_the_wire_form_keeps_the_records_of_the_sequences_that_have_them() -> None:
    small = np.full((4, 2, 2), 255, np.uint8)
    sent = [sequence(), sequence(routed_experts=None, kept_tokens=None), sequence(routed_experts=small)]
    first, second, third = decode_sequences(encode_sequences(sent))
    assert first.routed_experts is not None and first.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(first.routed_experts, EXPERTS)
    assert first.kept_tokens is not None and first.kept_tokens.ids.tolist() == [4, 1, 2]
    assert first.kept_tokens.offsets.tolist() == [0, 2, 2, 3]
    assert second.routed_experts is None and second.kept_tokens is None
    assert third.routed_experts is not None and third.routed_experts.dtype == np.uint8


@pytest.mark.parametrize(
    ("replay", "experts", "kept"),
    [
        (Replay(), False, False),
        (Replay(routing="R2"), False, False),
        (Replay(routing="R3"), True, False),
        (Replay(nucleus=True), False, True),
        (R3, True, True),
    ],
)
def test_only_what_is_replayed_goes_to_the_ranks(replay: Replay, experts: bool, kept: bool) -> None:
    (found,) = replayed([sequence()], replay, MODEL, 5)
    assert (found.routed_experts is not None, found.kept_tokens is not None) == (experts, kept)


def test_the_share_of_trained_tokens_that_replay_a_record_is_reported() -> None:
    # response tokens 0 and 2 are trained, predicted at tokens 1 and 3; token 3 has no experts on record
    experts = EXPERTS.copy()
    experts[3] = -1
    batch = [sequence(routed_experts=experts), sequence(routed_experts=None, kept_tokens=None)]
    assert replay_metrics(batch, R3) == {"routing_replayed": 1 / 4, "nucleus_replayed": 2 / 4}
    assert replay_metrics(batch, Replay()) == {}


def _changed(token: int, layer: int, place: int, expert: int) -> np.ndarray[Any, Any]:
    experts = EXPERTS.copy()
    experts[token, layer, place] = expert
    return experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routed_experts": EXPERTS[:, :1]}, "of 1 layers and top-2; the model has 2 layers with experts and top-2"),
        ({"routed_experts": EXPERTS[:, :, :1]}, "of 2 layers and top-1; the model has 2 layers"),
        ({"routed_experts": _changed(1, 0, 0, 4)}, "expert ids 0 to 4; expected 0 to 3"),
        ({"routed_experts": _changed(1, 0, 0, -2)}, "expert ids -2 to 3; expected 0 to 3"),
        ({"routed_experts": _changed(2, 1, 0, -1)}, "recorded for a part of token 2; expected all 2 x 2"),
        ({"routed_experts": _changed(2, 1, 0, 2)}, "expert 2 twice for token 2 in layer 1; expected 2 different"),
        ({"kept_tokens": KeptTokens.of([[5], [], []])}, "kept token ids 5 to 5; expected 0 to 4"),
    ],
)
def test_a_record_that_does_not_fit_the_model_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSequence, match=f"sequence 1 has .*{message}"):
        replayed([sequence(), sequence(**changes)], R3, MODEL, 5)


def test_a_record_of_other_tokens_is_refused_when_it_is_made() -> None:
    with pytest.raises(BadSequence, match="a row for each of 5 tokens but the last"):
        sequence(routed_experts=EXPERTS[:3])
    with pytest.raises(BadSequence, match="kept_tokens have 1 rows; expected 3"):
        sequence(kept_tokens=KeptTokens.of([[1]]))


@pytest.mark.parametrize(("frequency", "layers"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])])
def test_layers_without_experts_have_no_place_in_a_record(frequency: int | list[int], layers: list[int]) -> None:
    config: Any = SimpleNamespace(moe_layer_freq=frequency, num_layers=4)
    assert moe_layers(config) == layers
