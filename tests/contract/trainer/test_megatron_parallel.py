"""Every way to cut a model over ranks gives what one process gives: log-probabilities, losses, norms, weights.

One world per shape does everything: policy, critic (`gae`), moving reference, several optimizer steps a batch with a
sequence-level ratio and correction. Sizes are awkward (head_dim 24, 127 token ids, sequences from 3 to 151 tokens); batches
are packed in another way and order than the one process packs them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, Kl, Mis, Reference
from physarum.actors.trainer.batch import Float32, StepResult, TrainSequence
from physarum.actors.trainer.errors import NonFiniteStep, SnapshotNotTaken
from physarum.actors.trainer.world import World, WorldConfig
from physarum.weightsync.quantisation.presets import preset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # test_megatron_ranks.py has a quick one

VOCABULARY = 127
"""Odd: two vocabulary shards need a padded column."""
LENGTHS = ((1, 150), (3, 2), (2, 40), (30, 1), (5, 9), (1, 3), (17, 60), (4, 41), (2, 8))
"""(prompt, response) tokens: very different, shorter than any chunk, none a multiple of one."""
ALGORITHM = AlgorithmSettings(
    advantage="gae",
    loss="gspo",
    clip_low=0.05,
    clip_high=0.05,
    reduction="sequence",
    correction=(Mis(level="geometric", mode="truncate", high=1.5),),
    kl=Kl(coef=0.1),
    reference=Reference(update_every=2),
    minibatches=2,
)
SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"kind": "Qwen3", "tie_word_embeddings": True},
    "untied": {"kind": "Llama", "attention_bias": True},
    "moe": {
        "kind": "Qwen3Moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "glm4": {"kind": "Glm4", "pad_token_id": 0, "initializer_range": 0.1},
    "glm4-moe": {"kind": "Glm4Moe", "pad_token_id": 0, "use_qk_norm": True, "attention_bias": True, **SHARED_EXPERTS},
    "deepseek-v3": {
        "kind": "DeepseekV3",
        "num_key_value_heads": 4,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        **SHARED_EXPERTS,
    },
}


class Alone(msgspec.Struct):
    """What one process computes."""

    config: WorldConfig
    logprobs: list[Float32]
    steps: list[StepResult]
    weights: dict[str, torch.Tensor]
    start_weights: dict[str, torch.Tensor]


@contextmanager
def started(config: WorldConfig) -> Iterator[World]:
    world = World.start(config)
    try:
        yield world
    finally:
        world.close()


def batch() -> list[TrainSequence]:
    random = np.random.default_rng(5)
    sequences = []
    for index, (prompt, response) in enumerate(LENGTHS):
        mask = random.random(response) < 0.8
        mask[0] = True
        engine = np.where(mask, -random.gamma(4.0, 1.0, response), np.nan).astype(np.float32)
        ids = random.integers(0, VOCABULARY, prompt + response).astype(np.int32)
        sequences.append(TrainSequence(ids, prompt, mask, engine, float(random.normal()), index, index // 3))
    return sequences


def exported(world: World) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in world.export()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    made: dict[str, Alone] = {}

    def make(model: str) -> Alone:
        if model not in made:
            folder = tmp_path_factory.mktemp(model)
            _save_model(folder, **MODELS[model])
            config = WorldConfig(
                hf_folder=str(folder),
                lr=1e-3,
                eps=1e-3,
                tokens_per_microbatch=200,
                timeout_s=60.0,
                algorithm=ALGORITHM,
            )
            with started(config) as world:
                start_weights = exported(world)
                logprobs = world.logprobs(batch())
                steps = _steps(world, batch())
                made[model] = Alone(config, logprobs, steps, exported(world), start_weights)
        return made[model]

    return make


def _steps(world: World, sequences: list[TrainSequence]) -> list[StepResult]:
    """All sequences, the first alone (fewer than ranks), all again."""
    first = max(sequences, key=lambda one: one.length)
    return [world.step(part) for part in (sequences, [first], sequences)]


def _save_model(folder: Path, kind: str, **settings: Any) -> None:
    torch.manual_seed(0)
    common = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    common |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "initializer_range": 0.2, "head_dim": 24}
    config = getattr(transformers, f"{kind}Config")(**(common | settings))
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2": ("tied", {"ranks": 2, "pp": 2}),
    "tp2-sequence-parallel": ("tied", {"ranks": 2, "tp": 2}),  # test_megatron_ranks.py has a quick one
    "dp2": ("tied", {"ranks": 2}),  # test_megatron_ranks.py has the plain one
    "cp2": ("tied", {"ranks": 2, "cp": 2}),
    "ep2": ("moe", {"ranks": 2, "ep": 2}),
    "tp2": ("untied", {"ranks": 2, "tp": 2, "megatron": {"sequence_parallel": False}}),
    "tp2-tied": ("tied", {"ranks": 2, "tp": 2, "megatron": {"sequence_parallel": False}}),
    "tp2-sequence-parallel-untied": ("untied", {"ranks": 2, "tp": 2}),
    "pp2-untied": ("untied", {"ranks": 2, "pp": 2}),
    "cp2-untied": ("untied", {"ranks": 2, "cp": 2}),
    "cp2-experts": ("moe", {"ranks": 2, "cp": 2}),
    "tp2-experts": ("moe", {"ranks": 2, "tp": 2}),
    "tp2-ep2-etp1": ("moe", {"ranks": 2, "tp": 2, "ep": 2, "etp": 1}),
    "tp2-pp2": ("tied", {"ranks": 4, "tp": 2, "pp": 2}),
    "cp2-dp2": ("untied", {"ranks": 4, "cp": 2}),
    "pp2-dp2": ("untied", {"ranks": 4, "pp": 2}),
    "tp2-cp2": ("tied", {"ranks": 4, "tp": 2, "cp": 2}),
    "cp4": ("tied", {"ranks": 4, "cp": 4}),
    "pp4": ("tied", {"ranks": 4, "pp": 4}),
    "pp2-cp2-sharded-optimizer": (
        "untied",
        {"ranks": 4, "pp": 2, "cp": 2, "megatron": {"use_distributed_optimizer": True}},
    ),
    "pp2-ep2": ("moe", {"ranks": 4, "pp": 2, "ep": 2}),
    "ep2-dp2-sharded-optimizer": ("moe", {"ranks": 4, "ep": 2, "megatron": {"use_distributed_optimizer": True}}),
    "glm4-tp2": ("glm4", {"ranks": 2, "tp": 2}),
    "glm4-tp2-without-sequence-parallel": ("glm4", {"ranks": 2, "tp": 2, "megatron": {"sequence_parallel": False}}),
    "glm4-pp2": ("glm4", {"ranks": 2, "pp": 2}),
    "glm4-moe-tp2": ("glm4-moe", {"ranks": 2, "tp": 2}),
    "glm4-moe-pp2": ("glm4-moe", {"ranks": 2, "pp": 2}),
    "glm4-moe-ep2": ("glm4-moe", {"ranks": 2, "ep": 2}),
    "deepseek-v3-tp2": ("deepseek-v3", {"ranks": 2, "tp": 2}),
    "deepseek-v3-pp2-recomputed": ("deepseek-v3", {"ranks": 2, "pp": 2, "megatron": RECOMPUTED}),
    "deepseek-v3-ep2": ("deepseek-v3", {"ranks": 2, "ep": 2}),
    "deepseek-v3-cp2": ("deepseek-v3", {"ranks": 2, "cp": 2}),
    "recomputed-pp2-cp2": (
        "tied",
        {
            "ranks": 4,
            "pp": 2,
            "cp": 2,
            "megatron": RECOMPUTED,
        },
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_world_of_several_ranks_equals_one(alone: Callable[[str], Alone], tmp_path: Path, name: str) -> None:
    model, shape = SHAPES[name]
    _check(alone(model), tmp_path, shape)


def _check(alone: Alone, folder: Path, shape: dict[str, Any]) -> None:
    config = msgspec.structs.replace(alone.config, tokens_per_microbatch=170, **shape)
    sequences = batch()
    with started(config) as world:
        start = exported(world)
        assert start.keys() == alone.start_weights.keys()
        assert all(torch.equal(tensor, alone.start_weights[name]) for name, tensor in start.items())
        for found, expected in zip(world.logprobs(sequences), alone.logprobs, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        reordered = sorted(sequences, key=lambda one: (one.group, -one.execution))  # minibatches are whole groups
        for found, expected in zip(_steps(world, reordered), alone.steps, strict=True):
            _same(found, expected)
        _check_version(world, folder)
        for name, tensor in exported(world).items():
            torch.testing.assert_close(tensor, alone.weights[name], rtol=0, atol=2e-6, msg=name)
        with pytest.raises(NonFiniteStep):  # all ranks refuse together, and go on
            world.step([msgspec.structs.replace(sequences[0], advantage=float("nan")), *sequences[1:]])
        world.save(folder)
        after = world.step(sequences)
        world.load(folder)
        again = world.step(sequences)
        assert (again.loss, again.grad_norm, again.metrics) == (after.loss, after.grad_norm, after.metrics)


def _check_version(world: World, folder: Path) -> None:
    """What the ranks bring together is what rank 0 exports, byte by byte; twice, over memory that is there."""
    path = folder / "version.safetensors"
    path.touch()
    for old_bytes in (0, path.stat().st_size):
        assert world.snapshot(path, old_bytes) == path.stat().st_size
        found, expected = load_file(path), exported(world)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    fp8 = preset("fp8")
    path.write_bytes(b"")
    world.snapshot(path, 0, fp8)
    found, expected = load_file(path), dict(fp8.tensors(exported(world).items()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in expected.items())
    for full in (Path("/dev/full"), folder / "taken-away"):  # all ranks refuse together, and go on
        with pytest.raises(SnapshotNotTaken, match=f"{full}"):
            world.snapshot(full, 0)


def _same(found: StepResult, expected: StepResult) -> None:
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5, abs=1e-5)  # from 0.05 to 30
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        # A share counts tokens beyond a threshold: one that lies on it is a matter of rounding.
        tolerance = 2.0 / expected.tokens_trained if name.endswith("_share") else 2e-6
        assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=tolerance), name
