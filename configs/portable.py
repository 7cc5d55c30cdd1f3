"""What of a configuration is the same on every machine of a run: all but where files lie.

Invariant: two configurations that are portably equal place the same actors on the same machines. Not compared are paths, since
each machine has its own (`run.root`, models, interpreters), the folders of hooks' files (their names are), and `bus.url`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import xxhash
from pydantic import BaseModel

from physarum.configs.hooks import Hook
from physarum.configs.root import RootConfig


def portable(config: RootConfig) -> dict[str, Any]:
    """Plain values. The order of groups and machines decides who is where: it is kept beside them."""
    found = _plain(config)
    assert isinstance(found, dict)
    found["bus"]["url"] = None  # by which name a machine reaches the bus is its own affair: they met there
    return {**found, "order": {"engines": list(config.engines), "machines": list(config.machines)}}


def portable_digest(config: RootConfig) -> str:
    """xxh3-128 of the canonical JSON (sorted keys), 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(portable(config), option=orjson.OPT_SORT_KEYS))


def hooks_in(value: object) -> list[Hook]:
    """Every hook that a configuration names, each once."""
    if isinstance(value, Hook):
        return [value]
    inner: list[object] = []
    if isinstance(value, BaseModel):
        inner = [getattr(value, name) for name in type(value).model_fields]
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    return list(dict.fromkeys(hook for one in inner for hook in hooks_in(one)))


def portable_name(hook: Hook) -> str:
    """Without the folder of its file."""
    return f"{Path(hook.source).name}:{hook.attribute}" if hook.is_file else str(hook)


def differences(before: object, after: object, prefix: str = "") -> list[str]:
    """The dotted keys under which two plain values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        return [one for key in keys for one in differences(before.get(key), after.get(key), f"{prefix}.{key}")]
    return [] if before == after else [f"`{prefix.lstrip('.')}`"]


def _plain(value: object) -> object:
    """As in JSON, without paths."""
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Hook):
        return portable_name(value)
    if isinstance(value, Path):
        return None
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
