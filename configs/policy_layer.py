"""`policies:` completed: whatever a further policy does not write is as the run's own policy has it.

    model: {path: base}            policies:
    trainer: {lr: 1e-6, ...}         solver: {trainer: {lr: 1e-5}}     the run's start model and trainer, at another rate

Invariant: completing what is complete changes nothing, so a recorded configuration means what it meant.
"""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue

from physarum.configs.merge import merge
from physarum.configs.origin import KeyPath, Origin
from physarum.configs.yaml_file import Layer

_SECTIONS: Final = ("model", "trainer", "age", "groups", "filters")
_OWN: Final[dict[str, tuple[str, ...]]] = {"model": ("name",), "trainer": ("optimizer_start",)}
"""What is never inherited: one name for two models, and another model's moments."""


def with_policies(layer: Layer) -> Layer:
    """The layer with each policy complete; itself where there is none. Wrong shapes are left for the schema to refuse."""
    policies = layer.values.get("policies")
    if not isinstance(policies, dict):
        return layer
    complete, origins = dict[str, JsonValue](), dict[KeyPath, Origin]()
    for name, written in policies.items():
        made = _completed(layer, name, {} if written is None else written)
        complete[name] = made.values if isinstance(written, dict | None) else written
        origins |= {("policies", name, *key): origin for key, origin in made.origins.items()}
    return Layer({**layer.values, "policies": complete}, {**origins, **layer.origins})


def _completed(layer: Layer, name: str, written: JsonValue) -> Layer:
    lower = Layer({key: _inherited(key, layer.values[key]) for key in _SECTIONS if key in layer.values})
    lower.origins = {key: origin for key, origin in layer.origins.items() if key and key[0] in lower.values}
    own = {key[2:]: origin for key, origin in layer.origins.items() if key[:2] == ("policies", name) and len(key) > 2}
    made = merge(lower, Layer(written if isinstance(written, dict) else {}, own))
    if isinstance(model := made.values.get("model"), dict):
        model.setdefault("name", name)
    return made


def _inherited(key: str, section: JsonValue) -> JsonValue:
    if not isinstance(section, dict):
        return section
    return {name: value for name, value in section.items() if name not in _OWN.get(key, ())}
