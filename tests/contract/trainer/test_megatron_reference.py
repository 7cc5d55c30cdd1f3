"""One rank against plain Hugging Face and torch: logits, log-probabilities, loss, gradient norm, update, export."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings
from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(60)

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]


@contextmanager
def started(config: WorldConfig) -> Iterator[World]:
    world = World.start(config)
    try:
        yield world
    finally:
        world.close()


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def response_logprobs(model: PreTrainedModel, sequence: TrainSequence, temperature: float = 1.0) -> Tensor:
    """[R], one sequence at a time: no packing, no padding."""
    tokens = torch.from_numpy(sequence.token_ids).long()
    logprobs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
    return logprobs[sequence.prompt_len - 1 : -1].gather(1, tokens[sequence.prompt_len :, None])[:, 0]


def policy_terms(logprobs: Tensor, engine: Tensor, advantage: Any, algorithm: AlgorithmSettings) -> Tensor:
    """[tokens of one sequence], gradient through `logprobs`."""
    own = logprobs.detach()
    weight = torch.minimum((own - engine).exp(), torch.tensor(2.0)) if algorithm.correction else torch.ones_like(own)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.loss == "cispo":
        return -weight * (own - engine).exp().clamp(low, high) * advantage * logprobs
    if algorithm.loss == "gspo":
        ratio = (logprobs - engine).mean().exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage) * torch.ones_like(own)
    if algorithm.old_logprobs == "engine":
        ratio = (logprobs - engine).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return -weight * (logprobs - own).exp() * advantage


def reference_loss(model: PreTrainedModel, batch: list[TrainSequence], config: WorldConfig) -> Tensor:
    """The objective written out anew over the sequences, without any of the product's functions."""
    terms: dict[int, list[Tensor]] = {}
    for sequence in batch:
        mask = torch.from_numpy(sequence.loss_mask)
        logprobs = response_logprobs(model, sequence, config.temperature)[mask]
        engine = torch.from_numpy(sequence.engine_logprobs)[mask]
        loss = (
            -logprobs
            if config.objective == "sft"
            else policy_terms(logprobs, engine, sequence.advantage, config.algorithm)
        )
        terms.setdefault(sequence.execution, []).append(loss)
    executions = [torch.cat(parts) for parts in terms.values()]
    if config.algorithm.reduction == "execution":
        return torch.stack([execution.mean() for execution in executions if len(execution)]).mean()
    return torch.cat(executions).mean()


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({}, {}),
        (
            {"head_dim": 24, "kv_heads": 2, "tied": False},
            {"algorithm": AlgorithmSettings(reduction="execution"), "temperature": 0.7},
        ),
        ({"head_dim": 24}, {"algorithm": AlgorithmSettings(old_logprobs="engine", correction=())}),
        ({}, {"algorithm": AlgorithmSettings(correction=())}),
        ({}, {"algorithm": AlgorithmSettings(loss="cispo", old_logprobs="engine", correction=(), clip_low=1.0)}),
        ({}, {"algorithm": AlgorithmSettings(loss="gspo", old_logprobs="engine", correction=(), clip_low=0.01)}),
        ({}, {"objective": "sft"}),
    ],
    ids=["tied-tis", "untied-execution-mean", "head-dim-24-engine-ratio", "no-correction", "cispo", "gspo", "sft"],
)
def test_first_step_equals_plain_torch(
    model_folder: Folder, make_batch: Batch, model: dict[str, object], settings: dict[str, object]
) -> None:
    config = WorldConfig(hf_folder=str(model_folder(**model)), lr=1e-3, **settings)  # type: ignore[arg-type]
    batch = make_batch()
    hf = load(Path(config.hf_folder))
    loss = reference_loss(hf, batch, config)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), config.clip_grad)
    decayed = torch.optim.AdamW(hf.parameters(), lr=1e-3, betas=config.betas, eps=config.eps, weight_decay=0.0)
    decayed.step()
    with started(config) as world:
        result = world.step(batch)
        assert result.loss == pytest.approx(float(loss.detach()), abs=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert result.tokens_trained == sum(int(sequence.loss_mask.sum()) for sequence in batch)
        updated = dict(world.export())
    for name, parameter in hf.named_parameters():
        # Adam's first update is lr * sign(g) where |g| >> eps: compare where the sign is beyond rounding
        difference = (updated[name] - parameter.detach()).abs()
        assert float(difference[parameter.grad.abs() > 1e-6].max()) < 1e-5, name  # type: ignore[union-attr]


def test_weight_decay_spares_norms(model_folder: Folder, make_batch: Batch) -> None:
    """Megatron's groups carry wd_mult 0 for vectors; without a scheduler nobody applies it but us."""
    with started(WorldConfig(hf_folder=str(model_folder()), lr=1e-3, weight_decay=0.5, eps=1e6)) as world:
        before = {name: tensor.clone() for name, tensor in world.export()}
        world.step(make_batch())
        after = dict(world.export())
    for name, tensor in after.items():  # eps of a million: Adam moves nothing, decay alone does
        expected = before[name] if tensor.ndim == 1 else before[name] * (1 - 1e-3 * 0.5)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)


def test_logprobs_equal_hugging_face(model_folder: Folder, make_batch: Batch) -> None:
    folder = model_folder(head_dim=24)
    batch = make_batch(seed=3)
    with started(WorldConfig(hf_folder=str(folder), tokens_per_microbatch=64)) as world:
        measured = world.logprobs(batch)
    hf = load(folder)
    for sequence, logprobs in zip(batch, measured, strict=True):
        expected = response_logprobs(hf, sequence).detach().numpy()
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_after_load_is_bit_exact(
    model_folder: Folder, make_batch: Batch, tmp_path: Path, tied: bool, dtype: str
) -> None:
    folder = model_folder(head_dim=24, kv_heads=2, tied=tied)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with started(WorldConfig(hf_folder=str(folder), dtype=dtype)) as world:  # type: ignore[arg-type]
        exported = dict(world.export())
        world.save_hf(tmp_path / "hf")
        assert math.isfinite(world.step(make_batch()).grad_norm)
    assert exported.keys() == dict(expected.named_parameters()).keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == getattr(torch, dtype)
    assert (tmp_path / "hf" / "tokenizer_note.txt").is_file()
    for name, parameter in expected.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
