"""What a run asks of its engines besides tokens, as its configuration and its model's config.json have it.

Invariant: the layers named here are those whose routers the trainer replays (trainer/megatron/routing.py), in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from physarum.actors.errors import UnrecoverableError
from physarum.actors.policy_engines import policy_group
from physarum.agents.choices import Capture
from physarum.agents.session import EngineChoices
from physarum.configs.root import RootConfig

_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
_SEEDED: Final = ("enable-deterministic-inference", "rl-on-policy-target")
"""Arguments with which SGLang follows a request's seed."""


def engine_choices(config: RootConfig, model: Path) -> EngineChoices:
    """Of the run's training requests. `model`: the start model's folder. Raises UnrecoverableError. Blocking."""
    replay = config.trainer.algorithm.replay
    group = config.engines.get(policy_group(config))
    seeded = group is not None and any(any(group.values_of(name)) for name in _SEEDED)
    capture = Capture(nucleus=replay.nucleus)
    if replay.routing == "R3":
        capture = routed(json.loads((model / "config.json").read_text()), replay.nucleus)
    return EngineChoices(
        capture=capture if capture.layers or capture.nucleus else None,
        temperature=config.trained_temperature,
        seed=config.run.seed if seeded else None,
    )


def routed(hf: Mapping[str, Any], nucleus: bool = False) -> Capture:
    """Of a model with experts. Raises UnrecoverableError for one without."""
    text = hf.get("text_config") or hf
    experts = next((text[name] for name in _EXPERTS if text.get(name)), None)
    if experts is None:
        raise UnrecoverableError(
            f"trainer.algorithm.replay.routing: R3 with a {hf.get('model_type')} model, whose config.json has none of"
            f" {', '.join(_EXPERTS)}; expected a model with experts, or `routing: off`"
        )
    total = int(text["num_hidden_layers"])
    layers = tuple(layer for layer in range(total) if _has_experts(text, layer))
    return Capture(layers, total, int(text["num_experts_per_tok"]), int(experts), nucleus)


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    """By the rules of transformers' architectures (qwen3_moe: sparse step; deepseek: dense ones first, then a frequency)."""
    if types := text.get("mlp_layer_types"):
        return str(types[layer]) == "sparse"
    frequency = text.get("moe_layer_freq", 1)
    often = bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0
    sparse = (layer + 1) % (text.get("decoder_sparse_step") or 1) == 0
    dense = layer in (text.get("mlp_only_layers") or ()) or layer < (text.get("first_k_dense_replace") or 0)
    return often and sparse and not dense
