"""Hugging Face's small model with experts, told which experts and which tokens to take: what replay is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, Replay
from physarum.actors.trainer.batch import Experts, Float32, TrainSequence
from physarum.actors.trainer.world import World, WorldConfig
from physarum.bus.engine_choices import KeptTokens

VOCABULARY, LAYERS, EXPERTS, TOP_K = 127, 2, 4, 2
LENGTHS = ((1, 40), (3, 2), (12, 25), (30, 1), (5, 9), (2, 17))
"""(prompt, response) tokens of each sequence."""
R3 = Replay(routing="R3")
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Step = tuple[float, float]
"""Loss and gradient norm."""


def save_model(folder: Path) -> None:
    """2 layers of 4 experts, top-2."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


@contextmanager
def started(folder: Path, replay: Replay, **settings: Any) -> Iterator[World]:
    """Plain policy gradient: the loss is -r * advantage per token, r the ratio to the policy before the batch. `settings` of
    the algorithm or of the world."""
    own = {name: settings.pop(name) for name in ("minibatches", "old_logprobs", "kl") if name in settings}
    algorithm = AlgorithmSettings(correction=(), clip_low=1.0, clip_high=1e6, replay=replay, **own)
    usual: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "clip_grad": 0.0, "tokens_per_microbatch": 64, "timeout_s": 60.0}
    world = World.start(WorldConfig(hf_folder=str(folder), algorithm=algorithm, **(usual | settings)))
    try:
        yield world
    finally:
        world.close()


def batch() -> list[TrainSequence]:
    """Advantages above 0 only, so that the ratio is never clipped; two groups."""
    random = np.random.default_rng(7)
    made = []
    for index, (prompt, response) in enumerate(LENGTHS):
        mask = random.random(response) < 0.7
        mask[0] = True
        engine = np.where(mask, -random.gamma(4.0, 1.0, response), np.nan).astype(np.float32)
        ids = random.integers(0, VOCABULARY, prompt + response).astype(np.int32)
        made.append(TrainSequence(ids, prompt, mask, engine, float(random.random()) + 0.5, index, index // 3))
    return made


def told(sequences: Sequence[TrainSequence], experts: Sequence[Experts | None]) -> list[TrainSequence]:
    return [replace(one, routed_experts=own) for one, own in zip(sequences, experts, strict=True)]


def others(own: Experts, keep: float = 0.0) -> Experts:
    """Experts that the router did not choose together; a share `keep` of the tokens has no record."""
    changed = ((own + 1) % EXPERTS).astype(np.int16)
    changed[np.random.default_rng(len(own)).random(len(own)) < keep] = -1
    return changed


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@contextmanager
def forced(model: PreTrainedModel, experts: Experts | None, length: int) -> Iterator[list[Tensor]]:
    """Inside, Hugging Face's routers take `experts` ([T - 1, layers, top-k], -1 or None: as they choose) and what each
    took is noted, [T, top-k] per layer."""
    taken: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]

    def taking(gate: Any, wanted: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(hidden.reshape(-1, hidden.size(-1)), gate.weight)
            probabilities = logits.softmax(-1)
            chosen = torch.where(wanted >= 0, wanted, probabilities.topk(TOP_K).indices)
            taken.append(chosen)
            weights = probabilities.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    for layer, gate in enumerate(gates):
        wanted = torch.full((length, TOP_K), -1)
        if experts is not None:
            wanted[:-1] = torch.from_numpy(experts[:, layer].astype(np.int64))
        gate.forward = taking(gate, wanted)
    try:
        yield taken
    finally:
        for gate in gates:
            del gate.forward


def response_logprobs(model: PreTrainedModel, one: TrainSequence) -> Tensor:
    """[R], one sequence at a time, normalised over the kept tokens where there is a record."""
    tokens = torch.from_numpy(one.token_ids).long()
    with forced(model, one.routed_experts, one.length):
        logits = model(tokens[None]).logits[0, one.prompt_len - 1 : -1]
    if one.kept_tokens is not None:
        for row in range(one.response_len):
            ids = one.kept_tokens.take(np.array([row])).ids
            if len(ids):
                cut = torch.ones(VOCABULARY, dtype=torch.bool)
                cut[torch.from_numpy(ids).long()] = False
                logits = torch.where(cut & (torch.arange(len(logits)) == row)[:, None], -torch.inf, logits)
    return logits.log_softmax(-1).gather(1, tokens[one.prompt_len :, None])[:, 0]


def routing_of(model: PreTrainedModel, one: TrainSequence) -> Experts:
    """What Hugging Face's routers choose, int16 [T - 1, layers, top-k]."""
    with torch.no_grad(), forced(model, None, one.length) as taken:
        model(torch.from_numpy(one.token_ids).long()[None])
    return torch.stack(taken, 1)[:-1].numpy().astype(np.int16)


def loss_of(model: PreTrainedModel, sequences: Sequence[TrainSequence], old: Sequence[Tensor]) -> Tensor:
    """Mean over the trained tokens of -ratio * advantage, written out anew."""
    terms = []
    for one, before in zip(sequences, old, strict=True):
        mask = torch.from_numpy(one.loss_mask)
        ratio = (response_logprobs(model, one) - before).exp()[mask]
        terms.append(-ratio * float(one.advantage))
    return torch.cat(terms).mean()


def plain_steps(model: PreTrainedModel, parts: Sequence[Sequence[TrainSequence]]) -> list[Step]:
    """An AdamW step for each part; ratios are to the policy before the first."""
    with torch.no_grad():
        old = [[response_logprobs(model, one) for one in part] for part in parts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    found = []
    for part, before in zip(parts, old, strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, part, before)
        loss.backward()
        norm = torch.stack([one.grad.norm() for one in model.parameters() if one.grad is not None]).norm()
        optimizer.step()
        found.append((float(loss.detach()), float(norm)))
    return found


def same(found: Sequence[Float32], expected: Sequence[Float32 | Tensor], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, np.asarray(theirs), rtol=0, atol=tolerance)


def same_weights(world: World, expected: PreTrainedModel, folder: Path, tolerance: float) -> None:
    world.save_hf(folder)
    for name, parameter in load(folder).named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), rtol=0, atol=tolerance, msg=name)


def largest_difference(found: Sequence[Float32], other: Sequence[Float32]) -> float:
    return max(float(np.abs(one - two).max()) for one, two in zip(found, other, strict=True))


def with_kept(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """From one token (the sampled one) to all of the vocabulary; every fourth has no record."""
    random = np.random.default_rng(3)
    made = []
    for one in sequences:
        rows = []
        for place, target in enumerate(one.token_ids[one.prompt_len :].tolist()):
            rest = [token for token in range(VOCABULARY) if token != target]
            more = random.permutation(rest)[: random.integers(0, VOCABULARY)].tolist()
            rows.append([] if place % 4 == 3 else [target, *more])
        made.append(replace(one, kept_tokens=KeptTokens.of(rows)))
    return made
