"""Whether a model's sizes divide over the shape of a world.

Invariant: what passes here Megatron can build; what does not is refused by name before a process starts.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from physarum.actors.trainer.errors import UnsupportedParallelism
from physarum.actors.trainer.megatron.distributed import Shape

EXPERTS = ("num_experts", "n_routed_experts")
"""Names under which architectures say how many experts a layer has."""
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")
"""Megatron fields that say how many layers each stage has."""


def experts_field(config: PretrainedConfig) -> str | None:
    """The name of the architecture's number of experts; None where it has none."""
    return next((name for name in EXPERTS if getattr(config, name, None) is not None), None)


def check_fit(config: PretrainedConfig, shape: Shape, overrides: Mapping[str, Any]) -> None:
    """`config` is the folder's config.json, `overrides` the `megatron:` section. Raises UnsupportedParallelism."""
    experts = experts_field(config)
    if shape.ep > 1 and experts is None:
        raise UnsupportedParallelism(f"ep={shape.ep}, but a {config.model_type} model has no experts; expected ep 1")
    cuts = [("num_attention_heads", "tp"), ("num_key_value_heads", "tp")]
    if experts is None or getattr(config, "first_k_dense_replace", 0):
        cuts.append(("intermediate_size", "tp"))
    if experts is not None:
        cuts += [(experts, "ep"), ("moe_intermediate_size", "etp")]
    if getattr(config, "n_shared_experts", 0):
        cuts.append(("moe_intermediate_size", "tp"))
    if not any(name in overrides for name in UNEVEN):
        cuts.append(("num_hidden_layers", "pp"))
    for field, option in cuts:
        size, parts = getattr(config, field), getattr(shape, option)
        if size % parts:
            raise UnsupportedParallelism(
                f"{field} {size} does not divide by {option} {parts}; set {option} to a divisor of {size}"
            )
    if experts is not None and shape.tp > 1 and overrides.get("sequence_parallel") is False:
        raise UnsupportedParallelism(
            f"a model with experts at tp={shape.tp} without sequence_parallel; leave megatron.sequence_parallel out"
        )
