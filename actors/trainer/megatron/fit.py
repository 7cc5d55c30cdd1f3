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
    cuts = _cuts(config, experts)
    if not any(name in overrides for name in UNEVEN):
        cuts.append(("num_hidden_layers", config.num_hidden_layers, "pp"))
    for name, size, option in cuts:
        parts = getattr(shape, option)
        if size % parts:
            raise UnsupportedParallelism(
                f"{name} {size} does not divide by {option} {parts}; set {option} to a divisor of {size}"
            )
    if experts is not None and shape.tp > 1 and overrides.get("sequence_parallel") is False:
        raise UnsupportedParallelism(
            f"a model with experts at tp={shape.tp} without sequence_parallel; leave megatron.sequence_parallel out"
        )


def _cuts(config: PretrainedConfig, experts: str | None) -> list[tuple[str, int, str]]:
    """(name, size, the option that cuts it) of what lies in parts on the ranks of a pipeline stage."""
    fields = [("num_attention_heads", "tp"), ("num_key_value_heads", "tp")]
    if experts is None or getattr(config, "first_k_dense_replace", 0):
        fields.append(("intermediate_size", "tp"))
    if experts is not None:
        fields += [(experts, "ep"), ("moe_intermediate_size", "etp")]
    if getattr(config, "n_shared_experts", 0):
        fields.append(("moe_intermediate_size", "tp"))
    if getattr(config, "q_lora_rank", None) is not None:
        fields.append(("q_lora_rank", "tp"))
    cuts = [(name, int(getattr(config, name)), option) for name, option in fields]
    if getattr(config, "kv_lora_rank", None) is not None:
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        cuts.append(("kv_lora_rank + qk_rope_head_dim", latent, "tp"))
    return cuts
