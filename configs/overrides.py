"""Settings on the command line: `trainer.lr=1e-4`, `--megatron-FIELD V`, `--sglang-ARG V`, `--router-ARG V`.

Invariant: an override is one more layer over the files, so it merges, replaces and is checked like them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.merge import merge
from physarum.configs.origin import KeyPath, Origin, dotted
from physarum.configs.suggest import nearest
from physarum.configs.yaml_file import Layer, parse_value

EVERY_GROUP = "*"
"""Stands for each engine group that the files define, as in `engines.*.count=2`."""
ROUTER = "start_router"
"""Only engines that follow the policy have one: requests of rollout actors go through it."""

_ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z_][\w-]*(?:\.(?:[\w-]+|\*))*)=(?P<value>.*)", re.DOTALL)
_FLAG = re.compile(r"--(?P<program>megatron|sglang|router)-(?P<name>[A-Za-z][\w-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Override:
    """One setting. `key` may contain EVERY_GROUP in the place of an engine group's name."""

    key: tuple[str, ...]
    value: JsonValue


def parse_command_line(args: Sequence[str]) -> list[Override]:
    """Reads assignments and pass-through flags; values are YAML, a flag without a value is true.

    The word after a flag is its value unless it is a flag or an assignment itself; `--sglang-ARG=V` takes any value.
    Raises ConfigError naming every argument that is neither.
    """
    overrides: list[Override] = []
    problems: list[Problem] = []
    words = list(args)
    while words:
        word = words.pop(0)
        try:
            if (flag := _FLAG.fullmatch(word)) is not None:
                overrides.append(_from_flag(flag, words))
            elif (assignment := _ASSIGNMENT.fullmatch(word)) is not None:
                key = assignment["key"]
                overrides.append(
                    Override(tuple(key.split(".")), parse_value(assignment["value"], f"command line: {key}"))
                )
            else:
                problems.append(_unknown(word))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return overrides


def _from_flag(flag: re.Match[str], rest: list[str]) -> Override:
    """The override for a pass-through flag; takes the flag's value from `rest` when it has one there."""
    text = flag["value"]
    if text is None and rest and not _starts_setting(rest[0]):
        text = rest.pop(0)
    name = flag["name"]
    value = True if text is None else parse_value(text, f"command line: --{flag['program']}-{name}")
    if flag["program"] == "megatron":
        return Override(("trainer", "megatron", name.replace("-", "_")), value)
    section = "sglang" if flag["program"] == "sglang" else ROUTER
    return Override(("engines", EVERY_GROUP, section, name.replace("_", "-")), value)


def _starts_setting(word: str) -> bool:
    return word.startswith("--") or _ASSIGNMENT.fullmatch(word) is not None


def _unknown(word: str) -> Problem:
    program = word.lstrip("-").partition("-")[0]
    near = nearest(program, ("megatron", "sglang", "router")) if word.startswith("-") else None
    remedy = f"did you mean `--{near}-...`" if near else "write `section.key=value`, for example `trainer.lr=1e-4`"
    expected = "`section.key=value`, `--megatron-FIELD VALUE`, `--sglang-ARG VALUE` or `--router-ARG VALUE`"
    return Problem(Severity.ERROR, "command line", repr(word), expected, remedy)


def apply_overrides(layer: Layer, overrides: Iterable[Override]) -> Layer:
    """The layer with every override over it, in order. Raises ConfigError when EVERY_GROUP meets no engine group."""
    for override in overrides:
        for key in _expand(layer, override):
            layer = merge(layer, _as_layer(key, override.value))
    return layer


def _expand(layer: Layer, override: Override) -> list[KeyPath]:
    if override.key[:2] != ("engines", EVERY_GROUP):
        return [override.key]
    groups = layer.values.get("engines")
    if not isinstance(groups, dict) or not groups:
        where = f"command line: {dotted(override.key)}"
        remedy = "define a group under `engines:`, or name it: `engines.GROUP.sglang.ARG=VALUE`"
        raise ConfigError([Problem(Severity.ERROR, where, "no engine group", "at least one engine group", remedy)])
    frozen = {name for name, group in groups.items() if isinstance(group, dict) and group.get("model") is not None}
    named = [group for group in groups if override.key[2:3] != (ROUTER,) or group not in frozen]
    return [("engines", group, *override.key[2:]) for group in named]


def _as_layer(key: KeyPath, value: JsonValue) -> Layer:
    values: JsonValue = value
    for part in reversed(key):
        values = {str(part): values}
    assert isinstance(values, dict)
    origins = dict.fromkeys(_keys_below(key, value), Origin(None))
    return Layer(values, origins)


def _keys_below(key: KeyPath, value: JsonValue) -> list[KeyPath]:
    """`key` and every key inside its value."""
    items: Iterable[tuple[str | int, JsonValue]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [key, *(inner for name, item in items for inner in _keys_below((*key, name), item))]
