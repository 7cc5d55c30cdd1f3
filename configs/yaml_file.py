"""YAML read as JSON data (the core schema of YAML 1.2), with the line of every key.

Invariant: what is written is what is meant. `1e-4` is a number, `yes` and `22:30` and `2026-01-01` are text, a key
given twice is refused, and `dump` writes what `read` reads back as the same data.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.origin import KeyPath, Origin, display_path, dotted

_PREFIX = "tag:yaml.org,2002:"
_INT64 = range(-(1 << 63), 1 << 64)
_RESOLVERS: tuple[tuple[str, str, str], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser without the implicit types of YAML 1.1."""


class _CoreDumper(yaml.SafeDumper):
    """The writer that quotes exactly what `_CoreLoader` would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_CoreLoader, _CoreDumper):
    _class.yaml_implicit_resolvers = {}
    for _name, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(
            _PREFIX + _name, re.compile(_pattern), [*_first, ""] if _name == "null" else _first
        )


@dataclass
class Layer:
    """The data of one file (or of several merged ones) and where each part of it was written."""

    values: dict[str, JsonValue] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)


def read_yaml(path: Path) -> Layer:
    """Reads a file whose top level is a mapping; an empty file is an empty mapping. Raises ConfigError."""
    root = _compose(_read_text(path), display_path(path))
    layer = Layer(origins={(): Origin(path, 1)})
    if root is None:
        return layer
    builder = _Builder(path, layer.origins)
    values = builder.build(root, ())
    if not isinstance(values, dict):
        builder.refuse(root, f"a {_kind(values)} at the top level", "a mapping of sections", "start with `run:`")
    elif not builder.problems:
        layer.values = values
    if builder.problems:
        raise ConfigError(builder.problems)
    return layer


def parse_value(text: str, where: str) -> JsonValue:
    """Reads one value of the command line; an empty text is null. Raises ConfigError."""
    root = _compose(text, where)
    if root is None:
        return None
    builder = _Builder(None, {})
    value = builder.build(root, ())
    if builder.problems:
        raise ConfigError(builder.problems)
    return value


def write_yaml(values: JsonValue) -> str:
    """Block-style YAML that `read_yaml` reads back as the same data."""
    text: str = yaml.dump(values, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        found = f"bytes that are not UTF-8 at offset {error.start}"
        raise ConfigError([_problem(display_path(path), found, "UTF-8 text", "save the file as UTF-8")]) from None
    except OSError as error:
        found = f"no readable file ({error.strerror})"
        raise ConfigError(
            [_problem(display_path(path), found, "a configuration file", "correct the path or its permissions")]
        ) from None


def _compose(text: str, where: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        found = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError([_problem(place, found, "YAML", "correct the syntax there or just before")]) from None
    except yaml.reader.ReaderError as error:
        found = f"character {error.character!r} at offset {error.position}"
        raise ConfigError([_problem(where, found, "printable text", "remove the character")]) from None
    return node


def _problem(where: str, found: str, expected: str, remedy: str) -> Problem:
    return Problem(Severity.ERROR, where, found, expected, remedy)


def _kind(value: JsonValue) -> str:
    return "list" if isinstance(value, list) else "single value"


class _Builder:
    """Turns a node tree into JSON data and notes the origin of every key; collects problems instead of stopping."""

    def __init__(self, path: Path | None, origins: dict[KeyPath, Origin]) -> None:
        self.path = path
        self.origins = origins
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []

    def refuse(self, node: yaml.Node, found: str, expected: str, remedy: str) -> None:
        origin = Origin(self.path, node.start_mark.line + 1)
        self.problems.append(_problem(str(origin), found, expected, remedy))

    def build(self, node: yaml.Node, key: KeyPath) -> JsonValue:
        """The data below `node`; `key` is the path to it."""
        if any(node is outer for outer in self._open):
            self.refuse(node, f"`{dotted(key)}`, an alias of what holds it", "data without cycles", "remove the alias")
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, key)
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, key)
            return self._scalar(node)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, key: KeyPath) -> JsonValue:
        values: dict[str, JsonValue] = {}
        lines: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = name_node.value
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != _PREFIX + "str":
                self.refuse(name_node, f"the key {name!r}", "text as a key", "quote it")
                continue
            if name == "<<":
                self.refuse(name_node, "a merge key `<<`", "plain keys", "use `extends:` to reuse settings")
                continue
            line = name_node.start_mark.line + 1
            if name in lines:
                found = f"`{dotted((*key, name))}` a second time (first in line {lines[name]})"
                self.refuse(name_node, found, "each key once", "remove one of the two")
                continue
            lines[name] = line
            self.origins[(*key, name)] = Origin(self.path, line)
            values[name] = self.build(value_node, (*key, name))
        return values

    def _sequence(self, node: yaml.SequenceNode, key: KeyPath) -> JsonValue:
        items: list[JsonValue] = []
        for index, item in enumerate(node.value):
            self.origins[(*key, index)] = Origin(self.path, item.start_mark.line + 1)
            items.append(self.build(item, (*key, index)))
        return items

    def _scalar(self, node: yaml.Node) -> JsonValue:
        text = str(node.value)
        match node.tag.removeprefix(_PREFIX):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" if re.fullmatch(r"[-+]?\d+|0[ox][0-9a-fA-F]+", text):
                return self._integer(node, text)
            case "float" if re.fullmatch(r"[-+.\d][-+.\deE]*", text):
                return self._float(node, text)
        self.refuse(node, f"the tag {node.tag} on {text!r}", "plain YAML data", "remove the tag")
        return None

    def _integer(self, node: yaml.Node, text: str) -> JsonValue:
        value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if value not in _INT64:
            self.refuse(node, f"the number {text}", "a whole number of at most 64 bits", "quote it if it is text")
        return value

    def _float(self, node: yaml.Node, text: str) -> JsonValue:
        value = float(text)
        if not math.isfinite(value):
            self.refuse(node, f"the number {text}", "a finite number", "write a smaller number")
        return value
