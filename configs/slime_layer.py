"""A layer with slime's `sglang:` list read as one with `engines:`, so that a run may extend slime's own file."""

from __future__ import annotations

from pydantic import JsonValue

from physarum.configs.origin import KeyPath, Origin
from physarum.configs.slime_engines import KEY, import_engines
from physarum.configs.slime_flags import SlimeFlags
from physarum.configs.yaml_file import Layer


def translated(layer: Layer) -> Layer:
    """The layer with slime's models as `engines`; itself where it has no list `sglang`. Raises ConfigError."""
    if not isinstance(layer.values.get(KEY), list):
        return layer
    told = Layer({KEY: layer.values[KEY]}, layer.origins)
    engines = import_engines(told, SlimeFlags()).values["engines"]
    places = {key: origin for key, origin in layer.origins.items() if key[:1] != (KEY,)}
    below = layer.values.get("engines")
    values = {name: value for name, value in layer.values.items() if name != KEY}
    values["engines"] = {**(below if isinstance(below, dict) else {}), **(engines if isinstance(engines, dict) else {})}
    _note(places, ("engines",), values["engines"], layer.origins[KEY,])
    return Layer(values, places)


def _note(places: dict[KeyPath, Origin], key: KeyPath, value: JsonValue, origin: Origin) -> None:
    """What came of the list was written where it begins."""
    places.setdefault(key, origin)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _note(places, (*key, name), item, origin)
