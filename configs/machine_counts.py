"""A group that machines name has as many actors as they have together, unless its `count` is written.

Invariant: nothing that is written is changed; what does not fit together is left to the rules (rules/placing.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from physarum.configs.merge import merge
from physarum.configs.origin import KeyPath
from physarum.configs.yaml_file import Layer


def counted(layer: Layer) -> Layer:
    """The layer with the counts that follow from `machines:`."""
    machines = layer.values.get("machines")
    if not isinstance(machines, dict):
        return layer
    groups = list(_groups(layer.values.get("engines")))
    lower: dict[str, JsonValue] = {"engines": {str(name): {} for _, name in groups}} if groups else {}
    for key in (("rollout",), ("reward",), *groups):
        section = _at(layer.values, key)
        total = sum(_named(machine, key) for machine in machines.values())
        nodes = section.get("nodes", 1)
        if section.keys() & {"servers", "url"} or not isinstance(nodes, int) or nodes < 1:
            continue
        if total and total % nodes == 0:
            lower = _with(lower, key, total // nodes)
    return merge(Layer(lower, {}), layer)


def _groups(engines: JsonValue) -> Iterator[KeyPath]:
    if isinstance(engines, dict):
        yield from (("engines", name) for name in engines)


def _at(values: dict[str, JsonValue], key: KeyPath) -> dict[str, JsonValue]:
    found: JsonValue = values
    for part in key:
        found = found.get(str(part)) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _named(machine: JsonValue, key: KeyPath) -> int:
    """How many actors of a group an entry of `machines` has in all; 0 for what the schema will refuse."""
    if not isinstance(machine, dict):
        return 0
    each, count = _leaf(machine, key), machine.get("count")
    number = 1 if count is None else count
    return each * number if isinstance(each, int) and isinstance(number, int) else 0


def _leaf(machine: dict[str, JsonValue], key: KeyPath) -> JsonValue:
    engines = machine.get("engines")
    if len(key) == 1:
        return machine.get(str(key[0]))
    return engines.get(str(key[1])) if isinstance(engines, dict) else None


def _with(lower: dict[str, JsonValue], key: KeyPath, count: int) -> dict[str, JsonValue]:
    inner: dict[str, JsonValue] = {"count": count}
    if len(key) == 1:
        return {**lower, str(key[0]): inner}
    engines = lower.get("engines")
    return {**lower, "engines": {**(engines if isinstance(engines, dict) else {}), str(key[1]): inner}}
