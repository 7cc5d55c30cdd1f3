"""The `megatron:` section: any field of Megatron's configurations, by name.

Invariant: a key that no configuration has, or that another setting owns, is refused with the remedy; none is ignored.
"""

import dataclasses
import difflib
import enum
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from physarum.actors.trainer.errors import UnknownMegatronField

OWNED = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_eps": "eps",
    "clip_grad": "clip_grad",
    "bf16": "dtype",
    "fp16": "dtype",
    "params_dtype": "dtype",
    "pipeline_dtype": "dtype",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "calculate_per_token_loss": "reduction",
    "finalize_model_grads_func": "reduction",
    "moe_enable_routing_replay": "algorithm.replay.routing",
}
"""Megatron fields that a setting of the trainer decides, and its name."""

_NO_GROUPS = "the world does not make the groups that it needs"
_NOT_INTERLEAVED = "each rank has one stage of the pipeline, whose microbatches differ in length"
_NO_BALANCE = "Megatron scales it for a loss that is divided by the batch's tokens, which ours is not"
_FIXED = "the corrections of routers stay as the start model has them"
_CARRIED = "draft layers are not trained; an export has the start model's"
_OWN_ATTENTION = "attention over a shared pack gathers keys and values (trainer.cp)"
_READ_AT_ONCE = "weights are exported right after a step, before such a gather has happened"
REFUSED = {
    "virtual_pipeline_model_parallel_size": _NOT_INTERLEAVED,
    "overlap_p2p_comm": _NOT_INTERLEAVED,
    "variable_seq_lengths": _NOT_INTERLEAVED,
    "num_microbatches_with_partial_activation_checkpoints": _NOT_INTERLEAVED,
    "cp_comm_type": _OWN_ATTENTION,
    "hierarchical_context_parallel_sizes": _OWN_ATTENTION,
    "hybrid_context_parallel": _OWN_ATTENTION,
    "moe_router_load_balancing_type": _NO_BALANCE,
    "moe_z_loss_coeff": _NO_BALANCE,
    "moe_router_bias_update_rate": _FIXED,
    "mtp_num_layers": _CARRIED,
    "num_distributed_optimizer_instances": _NO_GROUPS,
    "use_megatron_fsdp": _READ_AT_ONCE,
    "overlap_param_gather": _READ_AT_ONCE,
    "overlap_param_gather_with_optimizer_step": _READ_AT_ONCE,
}
"""Megatron fields that would be silently wrong here, and why."""

SHAREABLE = ("adam", "sgd")
"""Optimizers whose state any other shape of a world reads."""

_CONFIGS = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)


class Overrides(typing.NamedTuple):
    """The same keys, sorted by the configuration that has them (a field of two, as bf16, goes to both)."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]


def sort_overrides(section: Mapping[str, Any]) -> Overrides:
    """Validate `megatron:` and sort it by configuration. Raises UnknownMegatronField."""
    fields = [{field.name: field for field in dataclasses.fields(config)} for config in _CONFIGS]
    known = {name for names in fields for name in names}
    sorted_keys: list[dict[str, Any]] = [{}, {}, {}]
    for key, value in section.items():
        if key in OWNED:
            raise UnknownMegatronField(f"megatron.{key} is decided by trainer.{OWNED[key]}; set that instead")
        if key in REFUSED:
            raise UnknownMegatronField(f"megatron.{key} is not available: {REFUSED[key]}; leave it out")
        if key not in known:
            raise UnknownMegatronField(f"megatron.{key}: Megatron-core has no such field{_nearest(key, known)}")
        for config, names, keys in zip(_CONFIGS, fields, sorted_keys, strict=True):
            if key in names:
                keys[key] = _convert(config, key, value)
    return Overrides(*sorted_keys)


def check_shareable(section: Mapping[str, Any]) -> None:
    """Refuse optimizers whose state torch_dist would not hold whole here. Raises UnknownMegatronField."""
    kind = section.get("optimizer", "adam")
    if kind not in SHAREABLE:
        raise UnknownMegatronField(
            f"megatron.optimizer is {kind!r}, whose state is not written in torch_dist; expected one of {SHAREABLE}: "
            "set trainer.checkpoint_format to ranks"
        )
    for field in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if section.get(field):
            raise UnknownMegatronField(
                f"megatron.{field} is on, whose state is not written in torch_dist; expected it off: leave it out, or set "
                "trainer.checkpoint_format to ranks"
            )


def _nearest(key: str, known: set[str]) -> str:
    match = difflib.get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {match[0]}?" if match else "; see TransformerConfig, OptimizerConfig and DDP's config"


def _convert(config: type, key: str, value: Any) -> Any:
    """`value` as the field's annotated type: dtypes and enums by name, numbers and flags strictly."""
    hint = typing.get_type_hints(config)[key]
    options = typing.get_args(hint) or (hint,)
    if torch.dtype in options and isinstance(value, str):
        dtype = getattr(torch, value, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    for option in options:
        if isinstance(option, type) and issubclass(option, enum.Enum) and value in option.__members__:
            return option[value]
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise UnknownMegatronField(
            f"megatron.{key} is {value!r} ({type(value).__name__}); expected {config.__name__}'s {hint}: {error}"
        ) from error
    except TypeError:
        return value  # an annotation that msgspec does not model (callables): Megatron checks it itself
