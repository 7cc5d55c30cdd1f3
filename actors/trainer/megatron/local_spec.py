"""Transformer layers from Megatron's own modules, without Transformer Engine.

Invariant: the same spec on CPU and CUDA. Two modules replace Megatron's local ones, which refuse what we need: RMSNorm
under sequence parallelism, and attention over packed sequences.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.megatron import flash
from physarum.actors.trainer.megatron.context import ContextShard
from physarum.actors.trainer.megatron.layout import PackedLayout, SegmentGroup


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) whose weight gradient is summed over tensor-parallel ranks under sequence parallelism.

    Each rank then normalises its own slice of the tokens; Megatron's finalize_model_grads adds up the gradients of
    parameters marked `sequence_parallel`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  Megatron's mark


class NormBeforeResidual(torch.nn.Module):
    """In the place of Megatron's bias-dropout-add: normalises what a sublayer gives before the residual stream takes it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Megatron's function of ((output, bias), residual, dropout probability) behind the norm."""
        add = get_bias_dropout_add(training, fused)

        def normed_add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            added: Tensor = add((self.norm(output if bias is None else output + bias), None), residual, dropout)
            return added

        return normed_add


def norm_before_residual(config: TransformerConfig) -> ModuleSpec:
    """For `self_attn_bda` and `mlp_bda` of a layer."""
    return ModuleSpec(module=NormBeforeResidual, params={"config": config})


def _device(config: TransformerConfig) -> torch.device | None:
    return None if config.use_cpu_initialization else torch.device(torch.cuda.current_device())


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences, by one flash kernel where it fits (flash.py); grouped queries supported.

    Elsewhere by torch's scaled_dot_product_attention: segments of like length are one batched call, whose right padding
    needs no mask (a causal token never looks right).
    Where a pack is shared by a context-parallel group, local queries attend to the gathered keys and values of all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        refuse_unsupported(config)
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """`query` [T, heads, d], `key` and `value` [T, groups, d] -> [T, heads * d]; T of this rank."""
        if not isinstance(packed_seq_params, PackedLayout) or attention_bias is not None:
            raise TypeError(
                f"packed_seq_params is a {type(packed_seq_params).__name__}; expected a PackedLayout and no bias"
            )
        layout = packed_seq_params
        if layout.shard is None or layout.order is None:
            if flash.fits(query, value, self.dropout if self.training else 0.0):
                return flash.attention(query, key, value, layout.bounds, layout.max_seqlen_q, self.scale).flatten(1)
            outputs = [self._attend(query, key, value, group) for group in layout.groups]
        else:
            key, value = _gathered(key, value, layout.shard, layout.order)
            outputs = [self._attend_shared(query, key, value, group, layout.shard) for group in layout.groups]
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup) -> Tensor:
        """One padded batch [count, heads, width, d] -> the group's tokens [tokens, heads * d]."""
        output = F.scaled_dot_product_attention(
            _padded(query, group),
            _padded(key, group),
            _padded(value, group),
            is_causal=True,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.size(1) != key.size(1),
        )
        rows = output.transpose(1, 2).reshape(group.count * group.width, -1)
        return rows if group.scatter is None else rows.index_select(0, group.scatter)

    def _attend_shared(
        self, query: Tensor, key: Tensor, value: Tensor, group: SegmentGroup, shard: ContextShard
    ) -> Tensor:
        """This rank's two chunks of every segment against all tokens up to each chunk's end -> [tokens / cp, heads * d]."""
        chunk = group.width // shard.unit
        own = query.narrow(0, group.start // shard.size, group.tokens // shard.size)
        own = own.reshape(group.count, 2, chunk, *own.shape[1:])
        keys, values = _padded(key, group), _padded(value, group)
        outputs = []
        for half, end in enumerate(((shard.rank + 1) * chunk, (shard.unit - shard.rank) * chunk)):
            output = F.scaled_dot_product_attention(
                own[:, half].transpose(1, 2),
                keys[:, :, :end],
                values[:, :, :end],
                attn_mask=_last_rows(chunk, end, query.device),
                scale=self.scale,
                dropout_p=self.dropout if self.training else 0.0,
                enable_gqa=query.size(1) != key.size(1),
            )
            outputs.append(output.transpose(1, 2))
        return torch.stack(outputs, 1).reshape(group.tokens // shard.size, -1)


def refuse_unsupported(config: TransformerConfig) -> None:
    """Raise UnsupportedModel for attention that PackedAttention would compute as something else."""
    found = {
        "window_size": config.window_size is not None,
        "softmax_type": config.softmax_type != "vanilla",
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
    }
    wrong = [name for name, differs in found.items() if differs]
    if wrong:
        raise UnsupportedModel(f"attention with {', '.join(wrong)} is not available; expected full causal attention")


def _gathered(key: Tensor, value: Tensor, shard: ContextShard, order: Tensor) -> tuple[Tensor, Tensor]:
    """[T / cp, groups, d] each -> [T, groups, d] in the pack's order; gradients of all ranks are summed on the way back."""
    both = torch.cat([key, value], -1)
    everyone = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=shard.group)
    whole_key, whole_value = everyone.index_select(0, order).split([key.size(-1), value.size(-1)], -1)
    return whole_key, whole_value


def _last_rows(queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal mask where the queries are the last of the keys. On CUDA it is only named: fused kernels know it."""
    if device.type == "cuda":
        named: Tensor = causal_lower_right(queries, keys)
        return named
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _padded(tensor: Tensor, group: SegmentGroup) -> Tensor:
    """[T, heads, d] -> [count, heads, width, d]."""
    rows = tensor.narrow(0, group.start, group.tokens)
    if group.gather is not None:
        rows = rows.index_select(0, group.gather)
    return rows.reshape(group.count, group.width, *tensor.shape[1:]).transpose(1, 2)


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or MoE as `config` says, with our norm and attention."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
        attention = modules.self_attention.submodules
        attention.core_attention = PackedAttention
        if not config.multi_latent_attention and attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec.layer_norm = RMSNorm
    return spec
