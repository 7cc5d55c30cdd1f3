"""Replay of experts (R2, R3) and of kept tokens in a real Megatron world, against Hugging Face's model told to do the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from replay_reference import (
    LAYERS,
    R3,
    RECOMPUTED,
    VOCABULARY,
    batch,
    largest_difference,
    load,
    others,
    plain_steps,
    response_logprobs,
    routing_of,
    same,
    same_weights,
    started,
    told,
    with_kept,
)

from physarum.actors.trainer.algorithm_settings import Kl, Replay
from physarum.actors.trainer.errors import BadSequence, UnknownMegatronField, UnsupportedModel, UnsupportedParallelism
from physarum.bus.engine_choices import KeptTokens

pytestmark = pytest.mark.timeout(120)


def test_replayed_experts_are_those_that_compute(experts_folder: Path) -> None:
    """The routers' own choice changes nothing, another one is taken token for token, and tokens without a record are free."""
    hf, sequences = load(experts_folder), batch()
    own = [routing_of(hf, one) for one in sequences]
    with started(experts_folder, R3) as world:
        free = world.logprobs(sequences)
        with torch.no_grad():
            same(free, [response_logprobs(hf, one) for one in sequences], 1e-5)
        same(world.logprobs(told(sequences, own)), free, 1e-6)
        nothing = [np.full_like(one, -1) for one in own]
        assert all(np.array_equal(*pair) for pair in zip(world.logprobs(told(sequences, nothing)), free, strict=True))
        for keep in (0.0, 0.5):
            changed = told(sequences, [others(one, keep) for one in own])
            changed[1] = replace(changed[1], routed_experts=None)  # a demonstration beside them
            found = world.logprobs(changed)
            assert largest_difference(found, free) > 0.1
            assert np.array_equal(found[1], free[1])
            with torch.no_grad():
                same(found, [response_logprobs(hf, one) for one in changed], 1e-5)
        small = [
            replace(one, routed_experts=np.where(one.routed_experts < 0, 255, one.routed_experts).astype(np.uint8))
            for one in changed
            if one.routed_experts is not None
        ]
        same(world.logprobs(small), [found[0], *found[2:]], 1e-6)


@pytest.mark.parametrize("megatron", [{}, RECOMPUTED], ids=["kept-activations", "recomputed"])
def test_a_step_with_replayed_experts_has_the_gradient_of_plain_torch(
    experts_folder: Path, tmp_path: Path, megatron: dict[str, Any]
) -> None:
    """Several microbatches; the router learns too: its weights of the replayed experts carry gradient."""
    hf = load(experts_folder)
    changed = told(batch(), [others(routing_of(hf, one), keep=0.3) for one in batch()])
    ((loss, norm),) = plain_steps(hf, [changed])
    with started(experts_folder, R3, megatron=megatron) as world:
        result = world.step(changed)
        same_weights(world, hf, tmp_path, 2e-5)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert 0 < result.metrics["routing_replayed"] < 1
    start = load(experts_folder)
    for name, parameter in hf.named_parameters():
        if ".gate.weight" in name:
            assert not torch.equal(parameter, start.get_parameter(name)), name


def test_the_second_minibatch_takes_the_experts_of_before_the_first(experts_folder: Path, tmp_path: Path) -> None:
    """R2: weights move by steps large enough to move the routing, which stays; without replay the result is another."""
    sequences = batch()
    hf = load(experts_folder)
    own = [routing_of(hf, one) for one in sequences]
    fixed = told(sequences, own)
    steps = plain_steps(hf, [fixed[:3], fixed[3:]])
    moved = [routing_of(hf, one) for one in sequences]
    assert sum(int((np.sort(a, -1) != np.sort(b, -1)).sum()) for a, b in zip(own, moved, strict=True)) > 20
    with started(experts_folder, Replay(routing="R2"), minibatches=2) as world:
        _, recorded = world._worker._passes.logprobs_and_routing(world._worker.model, sequences, 1.0)
        assert all(np.array_equal(np.sort(a, -1), np.sort(b, -1)) for a, b in zip(recorded, own, strict=True))
        result = world.step(sequences)
        same_weights(world, hf, tmp_path, 1e-4)
    assert result.metrics["routing_replayed"] == 1.0
    assert result.loss == pytest.approx(np.mean([loss for loss, _ in steps]), abs=1e-5)
    assert result.grad_norm == pytest.approx(np.mean([norm for _, norm in steps]), rel=1e-4)
    with started(experts_folder, Replay(), minibatches=2) as world:
        free = world.step(sequences)
    assert free.grad_norm != pytest.approx(result.grad_norm, rel=1e-3)


def test_log_probabilities_are_those_over_the_kept_tokens(experts_folder: Path) -> None:
    """Those of the softmax over the set, and the gradient of plain torch; together with replayed experts too."""
    hf = load(experts_folder)
    kept = with_kept(batch())
    both = told(kept, [others(routing_of(hf, one)) for one in kept])
    both[2] = replace(both[2], kept_tokens=None)
    with torch.no_grad():
        expected = [response_logprobs(hf, one) for one in kept]
        expected_both = [response_logprobs(hf, one) for one in both]
    ((loss, norm),) = plain_steps(hf, [both])
    with started(experts_folder, Replay(routing="R3", nucleus=True)) as world:
        same(world.logprobs(kept), expected, 1e-5)
        same(world.logprobs(both), expected_both, 1e-5)
        result = world.step(both)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    trained = sum(one.trained_tokens for one in both)
    recorded = sum(
        int((one.loss_mask & (np.arange(one.response_len) % 4 != 3)).sum()) for one in both if one.kept_tokens
    )
    assert result.metrics["nucleus_replayed"] == pytest.approx(recorded / trained)


def test_other_passes_over_the_batch_replay_what_the_training_pass_does(experts_folder: Path) -> None:
    """The version that made the tokens takes the engine's experts: ratio 1. The reference is normalised over the kept
    tokens, as the policy is: no penalty before the first update, though the whole softmax differs."""
    hf = load(experts_folder)
    changed = told(batch(), [others(routing_of(hf, one)) for one in batch()])
    with started(experts_folder, R3, old_logprobs="kept") as world:
        assert world.step(changed).metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    with started(experts_folder, Replay(nucleus=True), kl=Kl(coef=0.1)) as world:
        assert world.step(with_kept(batch())).metrics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_record_that_does_not_fit_is_refused_and_the_world_goes_on(experts_folder: Path) -> None:
    sequences = batch()
    fine = [np.tile(np.array([0, 1], np.int16), (one.length - 1, LAYERS, 1)) for one in sequences]
    with started(experts_folder, Replay(routing="R3", nucleus=True)) as world:
        for wrong, message in (
            (fine[0][:, :1], "of 1 layers and top-2; the model has 2 layers"),
            (fine[0][:, :, :1], "of 2 layers and top-1"),
            (fine[0] + np.int16(3), "expert ids 3 to 4; expected 0 to 3"),
        ):
            with pytest.raises(BadSequence, match=f"sequence 0 has .*{message}"):
                world.step(told(sequences, [wrong.astype(np.int16), *fine[1:]]))
        with pytest.raises(BadSequence, match="a row for each of 41 tokens but the last"):
            replace(sequences[0], routed_experts=fine[0][1:])
        kept = KeptTokens.of([[VOCABULARY]] * sequences[0].response_len)
        with pytest.raises(BadSequence, match=f"kept token ids 127 to 127; expected 0 to {VOCABULARY - 1}"):
            world.logprobs([replace(sequences[0], kept_tokens=kept)])
        assert world.step(told(sequences, fine)).metrics["routing_replayed"] == 1.0


def test_what_cannot_replay_is_refused_before_anything_starts(
    experts_folder: Path, model_folder: Callable[..., Path]
) -> None:
    alone_again = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    for where, settings, error, message in (
        (model_folder(), {}, UnsupportedModel, "replay.routing: R3 with a qwen3 model, which has no experts"),
        (experts_folder, {"megatron": {"moe_router_fusion": True}}, UnsupportedModel, "megatron.moe_router_fusion"),
        (
            experts_folder,
            {"ranks": 2, "pp": 2, "megatron": alone_again},
            UnsupportedParallelism,
            "with pp=2 and megatron",
        ),
        (
            experts_folder,
            {"megatron": {"moe_enable_routing_replay": True}},
            UnknownMegatronField,
            "decided by trainer.algorithm.replay.routing",
        ),
    ):
        with pytest.raises(error, match=message), started(where, R3, **settings):
            pass
