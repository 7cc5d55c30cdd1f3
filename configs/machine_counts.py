"""A group that machines name has as many actors as they have together, unless its `count` is written (null is not).

Invariant: no number that is written is changed; what does not fit together is left to the rules (rules/placing.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from physarum.configs.yaml_file import Layer

_Values = dict[str, JsonValue]
_Key = tuple[str, ...]


def counted(layer: Layer) -> Layer:
    """The layer with the counts that follow from `machines:`."""
    machines = layer.values.get("machines")
    if not isinstance(machines, dict):
        return layer
    values = layer.values
    for key in _groups(values.get("engines")):
        section = _at(values, key)
        total, nodes = sum(_named(machine, key) for machine in machines.values()), section.get("nodes", 1)
        if section.get("count") is not None or section.keys() & {"servers", "url"}:
            continue
        if isinstance(nodes, int) and nodes > 0 and total and total % nodes == 0:
            values = _with(values, (*key, "count"), total // nodes)
    return Layer(values, layer.origins)


def _groups(engines: JsonValue) -> Iterator[_Key]:
    """Those that machines may name, by their place in the configuration."""
    yield from (("rollout",), ("reward",))
    if isinstance(engines, dict):
        yield from (("engines", name) for name in engines)


def _at(values: JsonValue, key: _Key) -> _Values:
    """The mapping there; an empty one where there is none."""
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _named(machine: JsonValue, key: _Key) -> int:
    """How many actors of a group an entry of `machines` has in all; 0 for what the schema will refuse."""
    each = _at(machine, key[:-1]).get(key[-1])
    count = _at(machine, ()).get("count")
    number = 1 if count is None else count
    return each * number if isinstance(each, int) and isinstance(number, int) else 0


def _with(values: _Values, key: _Key, item: JsonValue) -> _Values:
    """A copy in which one value is another."""
    if len(key) == 1:
        return {**values, key[0]: item}
    return {**values, key[0]: _with(_at(values, key[:1]), key[1:], item)}
