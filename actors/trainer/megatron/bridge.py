"""Between a Hugging Face folder and Megatron's local-spec model, by mbridge's tables.

Invariant: exporting what was loaded gives the same bytes under the same names. mbridge expects Transformer Engine's
names; only the translation of names and the choice of layers are ours, nothing of mbridge is patched.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mbridge.models  # noqa: F401  fills mbridge's registry
import torch
import torch.distributed as dist
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from mbridge.core.llm_bridge import LLMBridge
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.local_spec import block_spec

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose logits and export were compared with transformers (tests/contract)."""

_LAYER = re.compile(r"(decoder\.layers\.(\d+)\.)(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")


class LocalSpecBridge(LLMBridge):
    """The parts of an mbridge bridge that depend on the layer spec; mixed into the architecture's own bridge."""

    def __init__(self, hf_config: PretrainedConfig, settings: Mapping[str, Any], **kwargs: Any) -> None:
        self._settings = dict(settings)
        self._DIRECT_MAPPING: dict[str, str] = dict(
            type(self)._DIRECT_MAPPING
        )  # mbridge writes tied names into the class's table
        super().__init__(hf_config, **kwargs)

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> TransformerConfig:
        return super()._build_base_config(text_config_key, **{**kwargs, **self._settings})

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        return block_spec(self.config, vp_stage)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **rotary_arguments(self.hf_config),
        }

    def _weight_name_mapping_mcore_local_to_global(
        self, model: torch.nn.Module, consider_ep: bool = True
    ) -> dict[str, str]:
        """Names of our modules -> the names that mbridge's tables know (Transformer Engine's, fused norms)."""
        dense = {index for index, layer in enumerate(model.decoder.layers) if "linear_fc1" in layer.mlp._modules}
        names = (name for name in model.state_dict() if "_extra_state" not in name)
        return {name: _table_name(name, dense) for name in names}


def _table_name(name: str, dense_layers: set[int]) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    prefix, layer, rest = match.group(1), int(match.group(2)), match.group(3)
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if layer in dense_layers:
        rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return prefix + _EXPERT.sub(r"mlp.experts.\2.\3\1", rest)


def rotary_arguments(hf_config: PretrainedConfig) -> dict[str, Any]:
    """GPTModel's rotary arguments from `rope_parameters`. Raises UnsupportedModel for a scaling Megatron lacks."""
    rope = dict(hf_config.rope_parameters)
    kind = rope.get("rope_type", "default")
    arguments: dict[str, Any] = {
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }
    if kind == "linear":
        return {**arguments, "seq_len_interpolation_factor": rope["factor"]}
    if kind == "llama3":
        fixed = (rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"])
        if fixed != (1.0, 4.0, 8192):
            raise UnsupportedModel(f"llama3 rope scaling with {fixed}; Megatron-core has (1.0, 4.0, 8192) built in")
        return {**arguments, "rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    if kind != "default":
        raise UnsupportedModel(f"rope scaling {kind!r} has no counterpart here; expected default, linear or llama3")
    return arguments


def read_config(folder: Path) -> PretrainedConfig:
    """The folder's config.json. Raises UnsupportedModel where it is missing, broken or of an unknown architecture."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"model folder {folder}: config.json is missing or unreadable ({error})") from error
    if config.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"model type {config.model_type!r} in {folder} is not supported; expected one of {SUPPORTED}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UnsupportedModel(f"{folder} uses sliding-window attention; expected full causal attention")
    return config


def make_bridge(folder: Path, dtype: torch.dtype, tp: int, settings: Mapping[str, Any]) -> LocalSpecBridge:
    """The bridge of the folder's architecture; `settings` are TransformerConfig fields that win over the model's."""
    config = read_config(folder)
    config.rope_theta = config.rope_parameters["rope_theta"]  # mbridge reads it where transformers < 5 had it
    architecture: type[Bridge] = _MODEL_REGISTRY[config.model_type]
    bridge_class = type(f"LocalSpec{architecture.__name__}", (LocalSpecBridge, architecture), {})
    padding = tp if config.vocab_size % tp else None
    return bridge_class(config, settings=settings, dtype=dtype, make_vocab_size_divisible_by=padding)


def load_hf(bridge: LocalSpecBridge, model: torch.nn.Module, folder: Path) -> None:
    """Fill `model` from the folder's safetensors; a collective over tensor-parallel ranks. Raises UnsupportedModel."""
    try:
        with torch.no_grad():
            bridge.load_weights([model], str(folder), memory_efficient=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"model folder {folder}: weights are missing or unreadable ({error})") from error


def exported_names(model: torch.nn.Module) -> list[str]:
    """Names of the parameters in export order, the same on every rank."""
    return [name for name, _ in model.named_parameters()]


def export_parameter(
    bridge: LocalSpecBridge, model: torch.nn.Module, name: str, parallel: Parallel
) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors of one parameter: contiguous host copies; a collective over `parallel.tp_group`."""
    parameter = model.get_parameter(name)
    table_name = bridge._weight_name_mapping_mcore_local_to_global(model)[name]
    whole = parameter.detach()
    if parallel.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
        shards = [torch.empty_like(whole) for _ in range(parallel.tp)]
        dist.all_gather(shards, whole.contiguous(), group=parallel.tp_group)
        whole = bridge._weight_merge_across_tp(table_name, shards, parameter)
    names, tensors = bridge._weight_to_hf_format(table_name, whole)
    return [(name, tensor.to("cpu", copy=True).contiguous()) for name, tensor in zip(names, tensors, strict=True)]
