"""`engines."*":` what each engine group has that does not say otherwise.

    engines: {"*": {sglang: {mem-fraction-static: 0.8}}, policy: {count: 4}, judge: {model: /m, update_timeout_s: 9}}

Invariant: it lies under every group of the merged files and under nothing else; the command line's `engines.*` lies over them.
"""

from __future__ import annotations

from typing import Final

from pydantic import JsonValue

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.merge import merge
from physarum.configs.origin import KeyPath, Origin, Origins
from physarum.configs.overrides import EVERY_GROUP
from physarum.configs.yaml_file import Layer

_OF_STARTED: Final = ("sglang", "env", "python")


def spread(layer: Layer) -> Layer:
    """The layer with the defaults under each group. Raises ConfigError where there is no group, or they are no mapping."""
    engines = layer.values.get("engines")
    if not isinstance(engines, dict) or EVERY_GROUP not in engines:
        return layer
    defaults, key = engines[EVERY_GROUP], ("engines", EVERY_GROUP)
    groups = {name: value for name, value in engines.items() if name != EVERY_GROUP}
    if not isinstance(defaults, dict) or not groups:
        found = "no engine group" if isinstance(defaults, dict) else f"`engines.*`: {defaults!r}"
        remedy = "define a group under `engines:`, or remove `*`" if isinstance(defaults, dict) else "write its keys"
        where = Origins(layer.origins).where(key)
        raise ConfigError([Problem(Severity.ERROR, where, found, "a mapping, and a group that takes it", remedy)])
    under: dict[str, JsonValue] = {name: _fitting(defaults, group) for name, group in groups.items()}
    below, upper = dict[KeyPath, Origin](), dict[KeyPath, Origin]()
    for at, origin in layer.origins.items():
        if at[:2] == key:
            below |= {("engines", name, *at[2:]): origin for name in groups}
        else:
            upper[at] = origin
    lower = Layer({"engines": under}, below)
    named: dict[str, JsonValue] = {name: {} if value is None else value for name, value in groups.items()}
    return merge(lower, Layer({**layer.values, "engines": named}, upper))


def _fitting(defaults: dict[str, JsonValue], group: JsonValue) -> JsonValue:
    """Somebody else's servers are not given what only a server that is started here can have."""
    attached = isinstance(group, dict) and group.get("url") is not None
    return {name: value for name, value in defaults.items() if not attached or name not in _OF_STARTED}
