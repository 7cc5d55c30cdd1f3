"""Which architectures there are, and the bridge of each.

Invariant: SUPPORTED names only what was compared with transformers; what of them would be computed as something else is
refused before a process starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mbridge.models  # noqa: F401  fills mbridge's registry
import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from transformers import AutoConfig, PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedModel
from physarum.actors.trainer.megatron.bridge import LocalSpecBridge
from physarum.actors.trainer.megatron.deepseek_v3 import DeepseekV3Bridge
from physarum.actors.trainer.megatron.glm4 import Glm4Bridge
from physarum.actors.trainer.megatron.glm4_moe import Glm4MoeBridge

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3")
"""Architectures whose logits and export were compared with transformers (tests/contract)."""

_OWN: dict[str, type[LocalSpecBridge]] = {
    "glm4": Glm4Bridge,
    "glm4_moe": Glm4MoeBridge,
    "deepseek_v3": DeepseekV3Bridge,
}
"""Where mbridge has no bridge, or one that is not the architecture's in every point."""


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
    if config.hidden_act != "silu":
        raise UnsupportedModel(f"{folder} has hidden_act {config.hidden_act!r}; expected 'silu'")
    _bridge_class(config).check(config)
    return config


def make_bridge(folder: Path, dtype: torch.dtype, tp: int, settings: Mapping[str, Any]) -> LocalSpecBridge:
    """The bridge of the folder's architecture; `settings` are TransformerConfig fields that win over the model's."""
    config = read_config(folder)
    config.rope_theta = config.rope_parameters["rope_theta"]  # mbridge reads it where transformers < 5 had it
    padding = tp if config.vocab_size % tp else None
    return _bridge_class(config)(config, settings=settings, dtype=dtype, make_vocab_size_divisible_by=padding)


def _bridge_class(config: PretrainedConfig) -> type[LocalSpecBridge]:
    if config.model_type in _OWN:
        return _OWN[config.model_type]
    known = _MODEL_REGISTRY[config.model_type]
    return type(f"LocalSpec{known.__name__}", (LocalSpecBridge, known), {})
