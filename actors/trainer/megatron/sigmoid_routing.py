"""Routers of DeepSeek-V3 (arXiv 2412.19437 section 2.1.2) and what took them over: sigmoid scores, a correction per expert.

Invariant: the correction decides which experts a token takes, never with which weight, and no step changes it: it is a buffer
of the start model that travels with the weights, in float32.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from transformers import PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedModel

_BEST_OF_GROUP = 2
"""A group of experts scores what its best two score together; Megatron takes top-k / groups chosen for that number."""


def router_fields(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Megatron's fields for experts, shared experts and routers."""
    limited = hf_config.topk_group < hf_config.n_group
    return {
        "num_moe_experts": hf_config.n_routed_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size * hf_config.n_shared_experts,
        "moe_layer_freq": [
            int(layer >= hf_config.first_k_dense_replace) for layer in range(hf_config.num_hidden_layers)
        ],
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_num_groups": hf_config.n_group if limited else None,
        "moe_router_group_topk": hf_config.topk_group if limited else None,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def check_router(hf_config: PretrainedConfig) -> None:
    """Raises UnsupportedModel for routers that Megatron computes otherwise."""
    top_k, groups, chosen = hf_config.num_experts_per_tok, hf_config.n_group, hf_config.topk_group
    if chosen < groups and top_k // chosen != _BEST_OF_GROUP:
        raise UnsupportedModel(
            f"num_experts_per_tok {top_k} with {chosen} of {groups} groups: Megatron scores a group by its best"
            f" {top_k // chosen} experts, the model by its best {_BEST_OF_GROUP}; expected num_experts_per_tok of"
            f" {_BEST_OF_GROUP} * topk_group, or all groups"
        )
    if hf_config.norm_topk_prob != (top_k > 1):
        raise UnsupportedModel(
            f"norm_topk_prob {hf_config.norm_topk_prob} with num_experts_per_tok {top_k}: Megatron normalises the weights of"
            " several experts and never that of one; expected the same of the model"
        )
    if getattr(hf_config, "moe_layer_freq", 1) != 1:
        raise UnsupportedModel(
            f"moe_layer_freq is {hf_config.moe_layer_freq}; expected 1: transformers has experts in each layer"
        )
    if not hf_config.n_shared_experts:
        raise UnsupportedModel(f"n_shared_experts is {hf_config.n_shared_experts}; expected 1 or more")


def fix_corrections(module: torch.nn.Module) -> None:
    """Megatron's routers would move their corrections after each step towards an equal load."""
    for router in module.modules():
        if isinstance(router, TopKRouter):
            router.frozen_expert_bias = True
