"""GLM-4 (arXiv 2406.12793; the 0414 models): norms behind attention and MLP as well, and rotation of neighbouring pairs.

Invariant: query and key rows lie in Megatron in the order that rotates halves, as its packed rotary code does. A dot product
does not see in which order its terms come, so the model is the same, and the way back gives the same bytes.
"""

from typing import ClassVar

import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from physarum.actors.trainer.megatron.bridge import LocalSpecBridge, rotary_arguments
from physarum.actors.trainer.megatron.local_spec import norm_before_residual

_LAYER = "model.layers.{layer_number}."
Names = dict[str, list[str]]
_QKV = ("q_proj", "k_proj", "v_proj")


class Glm4Bridge(LocalSpecBridge):
    """`glm4`; mbridge has none."""

    _ATTENTION_MAPPING: ClassVar[Names] = {
        "self_attention.linear_proj.weight": [_LAYER + "self_attn.o_proj.weight"],
        "self_attention.linear_qkv.layer_norm_weight": [_LAYER + "input_layernorm.weight"],
        "self_attention.linear_qkv.weight": [f"{_LAYER}self_attn.{one}.weight" for one in _QKV],
        "self_attention.linear_qkv.bias": [f"{_LAYER}self_attn.{one}.bias" for one in _QKV],
    }
    _MLP_MAPPING: ClassVar[Names] = {
        "mlp.linear_fc1.weight": [_LAYER + "mlp.gate_up_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": [_LAYER + "post_attention_layernorm.weight"],
        "mlp.linear_fc2.weight": [_LAYER + "mlp.down_proj.weight"],
        "mlp_bda.norm.weight": [_LAYER + "post_mlp_layernorm.weight"],
    }
    _OTHER_MAPPING: ClassVar[Names] = {"self_attn_bda.norm.weight": [_LAYER + "post_self_attn_layernorm.weight"]}

    def _build_config(self) -> TransformerConfig:
        return self._build_base_config(add_qkv_bias=self.hf_config.attention_bias, qk_layernorm=False)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        spec = super()._get_transformer_layer_spec(vp_stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = norm_before_residual(self.config)
        return spec

    def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[Tensor]) -> Tensor:
        if ".linear_qkv." in mcore_weights_name and len(hf_weights) == 3:
            query, key, value = hf_weights
            hf_weights = [self._reordered(query, halves=True), self._reordered(key, halves=True), value]
        return super()._weight_to_mcore_format(mcore_weights_name, hf_weights)

    def _weight_to_hf_format(self, mcore_weights_name: str, mcore_weights: Tensor) -> tuple[list[str], list[Tensor]]:
        names, tensors = super()._weight_to_hf_format(mcore_weights_name, mcore_weights)
        if len(names) == 3:
            query, key, value = tensors
            tensors = [self._reordered(query, halves=False), self._reordered(key, halves=False), value]
        return names, tensors

    def _reordered(self, rows: Tensor, halves: bool) -> Tensor:
        """Rows [heads * d, ...] of the rotary dimensions of each head: pairs (0, 1), (2, 3).. -> (0, 2.., 1, 3..), or back."""
        head_dim = self.config.kv_channels
        rotary = int(head_dim * rotary_arguments(self.hf_config)["rotary_percent"])
        order = torch.arange(head_dim)
        order[:rotary] = order[:rotary].reshape(-1, 2).T.flatten()
        if not halves:
            order = order.argsort()
        heads = rows.reshape(-1, head_dim, *rows.shape[1:])
        return heads.index_select(1, order.to(rows.device)).reshape(rows.shape)
