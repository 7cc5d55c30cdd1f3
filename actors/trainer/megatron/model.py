"""A GPTModel from a Hugging Face folder, wrapped in Megatron's DistributedDataParallel.

Invariant: gradients are *summed* over data-parallel ranks and microbatches (`calculate_per_token_loss`): the loss
carries its own denominator, so neither DDP nor the schedule may average.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel

from physarum.actors.trainer.megatron.architectures import make_bridge
from physarum.actors.trainer.megatron.bridge import LocalSpecBridge, load_hf
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.overrides import Overrides, sort_overrides
from physarum.actors.trainer.megatron.rotary import pack_rotary
from physarum.actors.trainer.megatron.routing import Routing
from physarum.actors.trainer.megatron.sigmoid_routing import fix_corrections

LOCAL_SPEC_SETTINGS: dict[str, Any] = {
    "transformer_impl": "local",
    # Fusions that need Transformer Engine or apex; the local spec has neither.
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}
CPU_SETTINGS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}
"""Without CUDA: parameters are made on the host, and no fusion that torch compiles."""


@dataclass(frozen=True)
class Model:
    """What a rank trains or asks: its stage of a model. `module` is the bare GPTModel inside `ddp` (frozen: the same)."""

    ddp: DistributedDataParallel | GPTModel
    module: GPTModel
    bridge: LocalSpecBridge
    vocab_size: int
    overrides: Overrides
    routing: Routing | None = None
    """Its routers, where they can be told what to choose."""

    @cached_property
    def table_names(self) -> dict[str, str]:
        """What the bridge calls each of this rank's weights; made once: it goes through all of them."""
        return self.bridge._weight_name_mapping_mcore_local_to_global(self.module)


def build(
    hf_folder: Path, parallel: Parallel, dtype: torch.dtype, overrides: Mapping[str, Any], replays: bool = False
) -> Model:
    """Build, load and wrap. `overrides` is the `megatron:` section; `replays`: routers can be told what to choose. Raises
    UnsupportedModel, UnknownMegatronField."""
    bare = build_frozen(hf_folder, parallel, dtype, overrides, replays)
    return wrapped(bare, dtype)


def wrapped(bare: Model, dtype: torch.dtype) -> Model:
    """`bare` with Megatron's gradient buffers; parameters that were added to its module are trained too."""
    config = bare.bridge.config
    ddp = DistributedDataParallel(config, _ddp_config(bare.overrides, dtype), bare.module)
    ddp.broadcast_params()
    config.finalize_model_grads_func = _finalize
    config.no_sync_func = ddp.no_sync
    return replace(bare, ddp=ddp)


def build_frozen(
    hf_folder: Path, parallel: Parallel, dtype: torch.dtype, overrides: Mapping[str, Any], replays: bool = False
) -> Model:
    """Build and load, without gradients' buffers. Raises as `build`."""
    chosen = sort_overrides(overrides)
    settings = dict(LOCAL_SPEC_SETTINGS)
    if parallel.device.type == "cpu":
        settings |= CPU_SETTINGS
    settings |= chosen.transformer | {"calculate_per_token_loss": True, "moe_enable_routing_replay": replays}
    bridge = make_bridge(hf_folder, dtype, parallel.tp, settings)
    module = bridge._model_provider([])(pre_process=parallel.pp_rank == 0, post_process=parallel.is_last_stage)
    pack_rotary(module)
    module.to(parallel.device)
    load_hf(bridge, module, hf_folder)
    fix_corrections(module)
    routing = Routing(module, bridge.config, parallel) if replays else None
    return Model(module, module, bridge, bridge.hf_config.vocab_size, chosen, routing)


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that makes the model what it is, by name: parameters, and buffers that are stored with them; the live tensors."""
    found = module.state_dict(keep_vars=True).items()
    return {name: tensor for name, tensor in found if isinstance(tensor, torch.Tensor)}


def _ddp_config(overrides: Overrides, dtype: torch.dtype) -> DistributedDataParallelConfig:
    """bf16 gradients are accumulated and reduced in float32 unless overridden."""
    return DistributedDataParallelConfig(**{"grad_reduce_in_fp32": dtype != torch.float32, **overrides.ddp})


def _finalize(model: list[torch.nn.Module], _tokens: torch.Tensor | None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division by tokens: our token weights already hold the denominator."""
    finalize_model_grads(model, None, **kwargs)
