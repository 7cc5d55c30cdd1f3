"""Multi-head latent attention (arXiv 2405.04434 section 2.1) over packed sequences, and its rotary fields.

Invariant: the part of the key that carries the position is shared by all heads, so under tensor parallelism its gradient is
summed over the ranks, which each have some of the heads.
"""

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.megatron.local_spec import RMSNorm

_LATENT_EPS = 1e-6
"""transformers gives the norms of the latents this, whatever `rms_norm_eps` says."""


class LatentNorm(RMSNorm):
    """The norm of a compressed query or key-value."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_unused: Any) -> None:
        super().__init__(config, hidden_size, eps=_LATENT_EPS)


class LatentAttention(MLASelfAttention):
    """Megatron's, whose local form forgets that sum: it gathers the compressed key-value in a way that splits gradients."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """The spec says it all. Megatron's resolver wants a fused norm where queries are not compressed."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The compressed query and key-value, both of full width, of this rank's slice of the tokens.

        Out of that slice Megatron gathers the positions' part with a summed gradient. Where tensor parallelism cuts the
        width there is a slice: a model with experts has sequence parallelism then (fit.py).
        """
        query, key_value = super()._qkv_down_projection(hidden_states)
        if key_value.size(-1) == self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            return query, key_value
        key_value = gather_from_tensor_model_parallel_region(key_value)
        return query, scatter_to_sequence_parallel_region(key_value)


def latent_attention(spec: ModuleSpec) -> ModuleSpec:
    """Megatron's spec of such an attention with our modules; its core attention is as everywhere."""
    spec.module = LatentAttention
    spec.submodules.q_layernorm = spec.submodules.kv_layernorm = LatentNorm
    return spec


def latent_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Megatron's fields for sizes and rotation."""
    return {
        "qk_layernorm": True,
        "q_lora_rank": hf_config.q_lora_rank,
        "kv_lora_rank": hf_config.kv_lora_rank,
        "qk_head_dim": hf_config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf_config.qk_rope_head_dim,
        "v_head_dim": hf_config.v_head_dim,
        "num_query_groups": hf_config.num_attention_heads,
        "kv_channels": hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim,
        "rotary_base": hf_config.rope_parameters["rope_theta"],
        **_scaling_fields(dict(hf_config.rope_parameters)),
    }


def _scaling_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """YaRN (arXiv 2309.00071) as DeepSeek-V3 has it: `mscale` and `mscale_all_dim` set the scale of cosines and softmax."""
    if rope.get("rope_type", "default") == "default":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    scale, scale_all = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": scale if scale_all else 1.0,
        "mscale_all_dim": scale_all,
    }


def check_latent(hf_config: PretrainedConfig) -> None:
    """Raises UnsupportedModel for an attention that Megatron computes otherwise."""
    rope = dict(hf_config.rope_parameters)
    kind = rope.get("rope_type", "default")
    query_dim = hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim
    found = {
        f"rope scaling {kind!r}, expected default or yarn": kind not in ("default", "yarn"),
        "an attention_factor, expected mscale and mscale_all_dim": rope.get("attention_factor") is not None,
        "truncate false, expected true": not rope.get("truncate", True),
        "mscale_all_dim without mscale, expected both": bool(rope.get("mscale_all_dim")) and not rope.get("mscale"),
        "rope_interleave false, expected true": not hf_config.rope_interleave,
        "attention_bias, expected none": bool(hf_config.attention_bias),
        f"v_head_dim {hf_config.v_head_dim}, expected at most {query_dim}": hf_config.v_head_dim > query_dim,
    }
    wrong = [name for name, differs in found.items() if differs]
    if wrong:
        raise UnsupportedModel(f"latent attention with {'; '.join(wrong)}: it would be computed as something else")
