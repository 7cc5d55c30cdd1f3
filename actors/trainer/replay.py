"""What of the engine's choices a batch takes along: checked on rank 0 before anything is computed, left out where the
configuration replays nothing of it.

Invariant: a record that reaches a rank fits the model: Megatron would route a token to fewer experts, or to none, without a
word.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from physarum.actors.trainer.algorithm_settings import Replay
from physarum.actors.trainer.batch import Experts, TrainSequence
from physarum.actors.trainer.errors import BadSequence
from physarum.actors.trainer.megatron.routing import Routing, signed
from physarum.bus.engine_choices import KeptTokens


def replayed(
    sequences: Sequence[TrainSequence], replay: Replay, routing: Routing | None, vocabulary: int
) -> list[TrainSequence]:
    """The sequences with what is replayed of their records, and no more. `routing`: of the policy, with R2 and R3. Raises
    BadSequence naming the sequence whose record does not fit the model."""
    found = []
    for index, one in enumerate(sequences):
        experts = one.routed_experts if replay.routing == "R3" else None
        kept = one.kept_tokens if replay.nucleus else None
        if experts is not None and routing is not None:
            _check_experts(f"sequence {index}", experts, routing)
        if kept is not None:
            _check_kept(f"sequence {index}", kept, vocabulary)
        same = experts is one.routed_experts and kept is one.kept_tokens
        found.append(one if same else msgspec.structs.replace(one, routed_experts=experts, kept_tokens=kept))
    return found


def replay_metrics(sequences: Sequence[TrainSequence], replay: Replay) -> dict[str, float]:
    """Shares of the trained tokens whose prediction replays a record; nothing where nothing is replayed."""
    shares = {}
    tokens = max(sum(one.trained_tokens for one in sequences), 1)
    if replay.routing != "off":
        shares["routing_replayed"] = sum(_routed(one) for one in sequences) / tokens
    if replay.nucleus:
        shares["nucleus_replayed"] = sum(_kept(one) for one in sequences) / tokens
    return shares


def _routed(sequence: TrainSequence) -> int:
    if sequence.routed_experts is None:
        return 0
    recorded = signed(sequence.routed_experts[sequence.prompt_len - 1 :, 0, 0]) >= 0
    return int((recorded & sequence.loss_mask).sum())


def _kept(sequence: TrainSequence) -> int:
    if sequence.kept_tokens is None:
        return 0
    return int(((sequence.kept_tokens.counts > 0) & sequence.loss_mask).sum())


def _check_experts(name: str, experts: Experts, routing: Routing) -> None:
    layers, top_k = experts.shape[1:]
    if (layers, top_k) != (routing.layers, routing.top_k):
        raise BadSequence(
            f"{name} has routed_experts of {layers} layers and top-{top_k}; the model has {routing.layers} layers with"
            f" experts and top-{routing.top_k}: record with the model that is trained, layers without experts left out"
        )
    chosen = signed(experts)
    if chosen.min(initial=-1) < -1 or chosen.max(initial=-1) >= routing.experts:
        raise BadSequence(
            f"{name} has expert ids {chosen.min()} to {chosen.max()}; expected 0 to {routing.experts - 1}, and -1 (uint8: 255)"
            " for tokens without a record"
        )
    present = (chosen >= 0).reshape(len(chosen), -1)
    partial = np.flatnonzero(present.any(1) & ~present.all(1))
    if partial.size:
        raise BadSequence(
            f"{name} has experts recorded for a part of token {int(partial[0])}; expected all {layers} x {top_k}, or none (-1)"
        )
    for first in range(top_k):
        for second in range(first + 1, top_k):
            twice = np.argwhere((chosen[..., first] == chosen[..., second]) & (chosen[..., first] >= 0))
            if twice.size:
                token, layer = twice[0].tolist()
                raise BadSequence(
                    f"{name} has expert {chosen[token, layer, first]} twice for token {token} in layer {layer}; expected"
                    f" {top_k} different ones"
                )


def _check_kept(name: str, kept: KeptTokens, vocabulary: int) -> None:
    if kept.ids.size and not 0 <= kept.ids.min() <= kept.ids.max() < vocabulary:
        raise BadSequence(
            f"{name} has kept token ids {kept.ids.min()} to {kept.ids.max()}; expected 0 to {vocabulary - 1}"
        )
