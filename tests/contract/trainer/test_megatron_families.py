"""GLM-4, GLM-4-MoE and DeepSeek-V3 against transformers: packed log-probabilities, gradients of every parameter, one step,
and the exported folder byte for byte.

Sizes are awkward on purpose: a head size of 16 hides errors of scale, equal sizes of query and value hide their mixing up.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(60)

VOCABULARY = 127
LENGTHS = ((1, 40), (3, 2), (12, 25), (30, 1), (2, 17))
"""(prompt, response) tokens; one pack."""
GLM4 = {"kind": "Glm4", "num_key_value_heads": 2, "head_dim": 20}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2}
EXPERTS |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
GLM4_MOE = {"kind": "Glm4Moe", "num_key_value_heads": 2, "head_dim": 20, "attention_bias": True, "use_qk_norm": True}
GLM4_MOE |= EXPERTS
DEEPSEEK = {"kind": "DeepseekV3", "q_lora_rank": 28, "kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 6}
DEEPSEEK |= {"v_head_dim": 10, "num_key_value_heads": 4, **EXPERTS}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "glm4": GLM4,
    "glm4-moe": GLM4_MOE,
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-yarn": DEEPSEEK | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "deepseek-v3-plain-yarn": DEEPSEEK | {"rope_parameters": YARN},
    "glm4-moe-without-groups": GLM4_MOE | {"n_group": 1, "topk_group": 1, "attention_bias": False, "use_qk_norm": False},
    "glm4-without-bias": GLM4 | {"attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
}
SLOW_CASES: dict[str, dict[str, Any]] = {}


def save_model(folder: Path, kind: str, **settings: Any) -> Path:
    """Every tensor random, norms and buffers as well: one that is not loaded, or loaded into another's place, shows."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    common |= {"num_attention_heads": 4, "initializer_range": 0.2, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**(common | settings))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 1 and tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def batch() -> list[TrainSequence]:
    random = np.random.default_rng(3)
    sequences = []
    for index, (prompt, response) in enumerate(LENGTHS):
        ids = random.integers(1, VOCABULARY, prompt + response).astype(np.int32)
        unknown = np.full(response, np.nan, np.float32)
        sequences.append(TrainSequence(ids, prompt, np.ones(response, np.bool_), unknown, 0.0, index))
    return sequences


def stored(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def expected_logprobs(model: PreTrainedModel, sequence: TrainSequence) -> Tensor:
    ids = torch.from_numpy(sequence.token_ids).long()
    logits: Tensor = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    return logits[sequence.prompt_len - 1 : -1].gather(1, ids[sequence.prompt_len :, None])[:, 0]


def load(folder: Path) -> PreTrainedModel:
    """Refused where a tensor is missing, unknown or of another shape."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.train()


def gradients(world: World) -> dict[str, float]:
    """Norm of each parameter's gradient that the last step left, by our name."""
    module = world._worker.model.module
    return {name: float(parameter.main_grad.norm()) for name, parameter in module.named_parameters()}


def check(folder: Path, target: Path) -> None:
    sequences = batch()
    world = World.start(WorldConfig(hf_folder=str(folder), objective="sft", lr=1e-3, clip_grad=0.0))
    try:
        found = world.logprobs(sequences)
        world.save_hf(target)
        result = world.step(sequences)
        left = gradients(world)
        after = {name: tensor.clone() for name, tensor in world.export()}
        again = world.logprobs(sequences)
    finally:
        world.close()
    original, exported = stored(folder), stored(target)
    assert exported.keys() == original.keys() == after.keys()
    assert all(same(exported[name], one) for name, one in original.items())
    model = load(target)
    expected = [expected_logprobs(model, one) for one in sequences]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=0, atol=1e-5)
    (-torch.cat(expected).mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert np.isfinite(result.loss)
    assert not [name for name, one in left.items() if not (np.isfinite(one) and one > 0)]
    trained = dict(model.named_parameters())
    for name, one in after.items():
        moved = not torch.equal(one, original[name])
        assert moved != is_fixed(name, model), name
    assert any((one != other).any() for one, other in zip(again, found, strict=True))
    assert trained


def is_fixed(name: str, model: PreTrainedModel) -> bool:
    return "e_score_correction_bias" in name or name.startswith(f"model.layers.{model.config.num_hidden_layers}.")


@pytest.mark.parametrize("case", CASES)
def test_packed_forward_gradients_step_and_export(tmp_path: Path, case: str) -> None:
    check(save_model(tmp_path / "start", **CASES[case]), tmp_path / "exported")
