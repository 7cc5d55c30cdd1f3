"""GLM-4, GLM-4-MoE and DeepSeek-V3 against transformers: packed log-probabilities, gradients of every parameter, one step,
and the exported folder byte for byte.

Sizes are awkward on purpose: a head size of 16 hides errors of scale, equal sizes of query and value hide their mixing up.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, Replay
from physarum.actors.trainer.batch import Experts, TrainSequence
from physarum.actors.trainer.errors import UnknownMegatronField, UnsupportedModel
from physarum.actors.trainer.hf_folder import write_hf_folder
from physarum.actors.trainer.world import World, WorldConfig
from physarum.weightsync.quantisation.presets import preset

pytestmark = pytest.mark.timeout(60)

VOCABULARY, LAYERS = 127, 3
CORRECTION = "e_score_correction_bias"
LENGTHS = ((1, 40), (3, 2), (12, 25), (30, 1), (2, 17))
"""(prompt, response) tokens; one pack."""
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2}
EXPERTS |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
ALL_GROUPS = {"n_group": 1, "topk_group": 1}
GLM4 = {"kind": "Glm4", "num_key_value_heads": 2, "head_dim": 20}
PLAIN_GLM4 = GLM4 | {"attention_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": True}
GLM4_MOE = {"kind": "Glm4Moe", "num_key_value_heads": 2, "head_dim": 20, **EXPERTS}
LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 6, "v_head_dim": 10, "num_key_value_heads": 4}
DEEPSEEK = {"kind": "DeepseekV3", "q_lora_rank": 28, **LATENT, **EXPERTS}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}
CASES: dict[str, dict[str, Any]] = {
    "glm4": GLM4,
    "glm4-without-bias-tied": PLAIN_GLM4,
    "glm4-moe": GLM4_MOE | {"attention_bias": True, "use_qk_norm": True},
    "glm4-moe-without-groups": GLM4_MOE | ALL_GROUPS,
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-yarn": DEEPSEEK | {"rope_parameters": YARN},
    "deepseek-v3-scaled-yarn-plain-query": DEEPSEEK
    | ALL_GROUPS
    | {"q_lora_rank": None, "rope_parameters": SCALED_YARN},
}


def save_model(folder: Path, kind: str, **settings: Any) -> Path:
    """Every tensor random, norms and corrections as well: one that is not loaded, or is taken for another, shows."""
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    common |= {"num_attention_heads": 4, "initializer_range": 0.2, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**(common | settings))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(CORRECTION):
                tensor.normal_(std=0.1)
            elif tensor.dim() == 1 and tensor.requires_grad:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    model.save_pretrained(folder)
    return folder


def add_draft_layer(folder: Path) -> dict[str, Tensor]:
    """As the folders of DeepSeek-V3 and GLM-4.5 have one, in a file of its own that an index names."""
    drafts = {
        f"model.layers.{LAYERS}.eh_proj.weight": torch.randn(64, 128),
        f"model.layers.{LAYERS}.enorm.weight": torch.randn(64, dtype=torch.bfloat16),
        f"model.layers.{LAYERS}.mlp.gate.{CORRECTION}": torch.randn(8),
    }
    known = dict.fromkeys(stored(folder), "model.safetensors")
    save_file(drafts, folder / "draft.safetensors")
    weight_map = known | dict.fromkeys(drafts, "draft.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return drafts


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
    finally:
        world.close()
    check_export(stored(folder), stored(target), after)
    model = load(target)
    expected = [expected_logprobs(model, one) for one in sequences]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=0, atol=1e-5)
    loss = -torch.cat(expected).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert (result.loss, result.grad_norm) == (
        pytest.approx(loss.item(), rel=1e-5),
        pytest.approx(float(norm), rel=1e-4),
    )
    assert not [name for name, one in left.items() if not (np.isfinite(one) and one > 0)]


def check_export(original: dict[str, Tensor], exported: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """The same bytes under the same names; after a step all differ but what no step may change."""
    assert exported.keys() == original.keys() == after.keys()
    assert not [name for name, one in original.items() if not same(exported[name], one)]
    fixed = {name for name, one in original.items() if same(after[name], one)}
    assert fixed == {name for name in original if name.endswith(CORRECTION) or f"layers.{LAYERS}." in name}


@pytest.mark.parametrize("case", CASES)
def test_packed_forward_gradients_step_and_export(tmp_path: Path, case: str) -> None:
    check(save_model(tmp_path / "start", **CASES[case]), tmp_path / "exported")


def test_a_draft_layer_is_exported_as_the_start_model_has_it(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", **DEEPSEEK)
    drafts = add_draft_layer(start)
    world = World.start(WorldConfig(hf_folder=str(start), objective="sft"))
    try:
        world.step(batch())
        world.save_hf(tmp_path / "exported")
    finally:
        world.close()
    exported = stored(tmp_path / "exported")
    assert exported.keys() == stored(start).keys() > drafts.keys()
    assert all(same(exported[name], one) for name, one in drafts.items())
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "float32"


def test_a_start_model_in_fp8_is_trained_as_it_was_and_its_draft_layer_goes_with_it(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", **DEEPSEEK)
    add_draft_layer(start)
    write_hf_folder(start, tmp_path / "fp8", stored(start).items(), preset("fp8"))
    world = World.start(WorldConfig(hf_folder=str(tmp_path / "fp8")))
    try:
        exported = dict(world.export())
        path = tmp_path / "version.safetensors"
        path.touch()
        world.snapshot(path, 0)
    finally:
        world.close()
    version, exact = load_file(path), stored(start)
    assert exported.keys() == version.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(version[name], exported[name])
        assert torch.allclose(exported[name].float(), tensor.float(), rtol=0.07, atol=2e-3), name


def test_in_bfloat16_corrections_stay_float32(tmp_path: Path) -> None:
    start = save_model(tmp_path / "start", **DEEPSEEK)
    world = World.start(WorldConfig(hf_folder=str(start), objective="sft", dtype="bfloat16"))
    try:
        world.step(batch())
        world.save_hf(tmp_path / "exported")
    finally:
        world.close()
    original = stored(start)
    for name, one in stored(tmp_path / "exported").items():
        assert same(one, original[name]) if name.endswith(CORRECTION) else one.dtype == torch.bfloat16, name
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("routing", ["R2", "R3"])
def test_experts_are_replayed_where_first_layers_have_none(tmp_path: Path, routing: Literal["R2", "R3"]) -> None:
    """Experts of the routers' own choice: nothing changes; of another: something does."""
    start = save_model(tmp_path / "start", **DEEPSEEK)
    sequences = [
        replace(one, advantage=1.0, engine_logprobs=np.full(one.response_len, -5, np.float32)) for one in batch()
    ]
    losses = {}
    for name, replay in (("free", Replay()), ("replayed", Replay(routing=routing))):
        algorithm = AlgorithmSettings(minibatches=2, correction=(), replay=replay)
        world = World.start(WorldConfig(hf_folder=str(start), lr=1e-4, algorithm=algorithm))
        try:
            recorded = (
                [replace(one, routed_experts=experts(one)) for one in sequences] if routing == "R3" else sequences
            )
            losses[name] = world.step(recorded).grad_norm
        finally:
            world.close()
    assert (losses["free"] == pytest.approx(losses["replayed"], rel=1e-3)) == (routing == "R2")


def experts(sequence: TrainSequence) -> Experts:
    """The first four in each of the layers that have any."""
    return np.tile(np.arange(4, dtype=np.int16), (sequence.length - 1, LAYERS - 1, 1))


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        (
            DEEPSEEK,
            {"num_experts_per_tok": 2},
            "Megatron scores a group by its best 1 experts, the model by its best 2",
        ),
        (GLM4_MOE, {"norm_topk_prob": False}, "norm_topk_prob False with num_experts_per_tok 4"),
        (GLM4_MOE, {"rope_parameters": YARN}, "rope scaling 'yarn'"),
        (GLM4_MOE, {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (
            DEEPSEEK,
            {"rope_parameters": YARN | {"rope_type": "linear"}},
            "rope scaling 'linear', expected default or yarn",
        ),
        (DEEPSEEK, {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim without mscale"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave false"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias, expected none"),
        (DEEPSEEK, {"v_head_dim": 24}, "v_head_dim 24, expected at most 20"),
    ],
)
def test_what_would_be_computed_as_something_else_is_refused(
    tmp_path: Path, case: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    kind, fields = case["kind"], {name: value for name, value in case.items() if name != "kind"}
    config = getattr(transformers, f"{kind}Config")(**(fields | settings))
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        World.start(WorldConfig(hf_folder=str(tmp_path)))


@pytest.mark.parametrize("field", ["moe_router_bias_update_rate", "mtp_num_layers"])
def test_what_would_move_what_is_fixed_is_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(UnknownMegatronField, match=f"megatron.{field} is not available"):
        World.start(WorldConfig(hf_folder=str(tmp_path), megatron={field: 1}))
