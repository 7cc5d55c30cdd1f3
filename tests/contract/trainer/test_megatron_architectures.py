"""Every supported architecture against transformers: log-probabilities, gradient norm, and the exported folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(60)

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., Path]:
    def save(name: str, **settings: Any) -> Path:
        torch.manual_seed(0)
        common = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        common |= {"vocab_size": 128, "num_key_value_heads": 2, "initializer_range": 0.2}
        config = getattr(transformers, f"{name}Config")(**common, **settings)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(".bias"):
                    parameter.normal_()  # zero at first: a bias that is not loaded would go unnoticed
        model.save_pretrained(tmp_path / "start")
        return tmp_path / "start"

    return save


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", {}),
        ("Llama", LINEAR),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 24}),
        ("Qwen3Moe", {"head_dim": 24, **MOE}),
    ],
    ids=["llama", "llama-linear-rope", "qwen2-bias-tied", "qwen3", "qwen3-moe"],
)
def test_forward_backward_and_export(
    save_model: Callable[..., Path], tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    folder = save_model(name, **settings)
    tokens = np.random.default_rng(0).integers(0, 128, 40).astype(np.int32)
    sequence = TrainSequence(tokens, 3, np.ones(37, np.bool_), np.full(37, np.nan, np.float32), 0.0, 0)
    world = World.start(WorldConfig(hf_folder=str(folder), objective="sft"))
    try:
        (logprobs,) = world.logprobs([sequence])
        world.save_hf(tmp_path / "exported")
        result = world.step([sequence])
    finally:
        world.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.from_numpy(tokens).long()
    expected = model(ids[None]).logits[0].log_softmax(-1)[2:-1].gather(1, ids[3:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-5)
    (-expected.mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    original = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Mistral", {}, "model type 'mistral' in .* is not supported; expected one of"),
        ("Llama", YARN, "rope scaling 'yarn'"),
        ("Qwen2", {"use_sliding_window": True}, "sliding-window attention"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'; expected 'silu'"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    save_model: Callable[..., Path], name: str, settings: dict[str, Any], message: str
) -> None:
    folder = save_model(name, **settings)
    with pytest.raises(UnsupportedModel, match=message):
        World.start(WorldConfig(hf_folder=str(folder)))
