"""Layers of configuration, the upper one over the lower one.

Invariant: mappings merge key by key, everything else is replaced whole, null included. A layer that names one of
several alternatives (`model.path`) sets aside the others (`model.hub`) of the layers below it; one that names another
hook (or, for a reward, another type) sets aside the `args` of the one below.
"""

from __future__ import annotations

from pydantic import JsonValue

from physarum.configs.evaluation import EvaluationConfig
from physarum.configs.model import ModelConfig
from physarum.configs.origin import KeyPath
from physarum.configs.reward import GroupRewardConfig, RewardConfig
from physarum.configs.source import SourceConfig
from physarum.configs.yaml_file import Layer

_ALTERNATIVES: dict[KeyPath, tuple[str, ...]] = {
    ("model",): ModelConfig.alternatives,
    ("source",): SourceConfig.alternatives,
    ("evaluation",): EvaluationConfig.alternatives,
    ("reward",): RewardConfig.alternatives,
    ("reward", "group"): GroupRewardConfig.alternatives,
}
_HOOK_KEYS = ("hook", "generate", "type", "custom_rm")


def merge(lower: Layer, upper: Layer) -> Layer:
    """A new layer; neither argument is changed."""
    values = _merge_mappings(lower.values, upper.values, ())
    origins = {key: origin for key, origin in {**lower.origins, **upper.origins}.items() if _exists(values, key)}
    return Layer(values, origins)


def _merge_mappings(lower: dict[str, JsonValue], upper: dict[str, JsonValue], key: KeyPath) -> dict[str, JsonValue]:
    lost = _set_aside(key, upper)
    lost |= _stale_arguments(lower, upper, lost)
    merged = {name: value for name, value in lower.items() if name not in lost}
    for name, value in upper.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[name] = _merge_mappings(below, value, (*key, name))
        else:
            merged[name] = value
    return merged


def _set_aside(key: KeyPath, upper: dict[str, JsonValue]) -> set[str]:
    """The alternatives of section `key` that the lower layer loses, because the upper one names another."""
    alternatives = _ALTERNATIVES.get(key, ())
    named = {name for name in alternatives if upper.get(name) is not None}
    return set(alternatives) - named if named else set()


def _stale_arguments(lower: dict[str, JsonValue], upper: dict[str, JsonValue], lost: set[str]) -> set[str]:
    """`args` when the upper layer puts another hook, or an alternative, in the place of what they were written for."""
    changed = any(name in upper and name in lower and upper[name] != lower[name] for name in _HOOK_KEYS)
    replaced = any(lower.get(name) is not None for name in lost.intersection(_HOOK_KEYS))
    return {"args"} if changed or replaced else set()


def _exists(values: JsonValue, key: KeyPath) -> bool:
    for part in key:
        match values, part:
            case dict() as mapping, str(name) if name in mapping:
                values = mapping[name]
            case list() as items, int(index) if index < len(items):
                values = items[index]
            case _:
                return False
    return True
