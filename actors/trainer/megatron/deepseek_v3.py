"""DeepSeek-V3 and its like (arXiv 2412.19437): mbridge's names, with the configuration that transformers reads.

mbridge's configuration has no expert groups and builds the draft layers, which nothing here trains (draft_layers.py).
"""

from collections.abc import Mapping
from typing import Any

from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge as Known
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from physarum.actors.trainer.megatron.bridge import LocalSpecBridge
from physarum.actors.trainer.megatron.latent_attention import check_latent, latent_attention, latent_fields
from physarum.actors.trainer.megatron.sigmoid_routing import check_router, router_fields


class DeepseekV3Bridge(LocalSpecBridge, Known):
    """`deepseek_v3`."""

    NORM_NAMES: Mapping[str, str] = {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    }

    @classmethod
    def check(cls, hf_config: PretrainedConfig) -> None:
        check_latent(hf_config)
        check_router(hf_config)

    def _build_config(self) -> TransformerConfig:
        return self._build_base_config(**latent_fields(self.hf_config), **router_fields(self.hf_config))

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        spec = super()._get_transformer_layer_spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention = latent_attention(layer.submodules.self_attention)
        return spec

    def _get_gptmodel_args(self) -> dict[str, Any]:
        """Each layer has its own rotary embedding; the model has none."""
        return LLMBridge._get_gptmodel_args(self)
