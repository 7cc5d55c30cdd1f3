"""From files and overrides to one RootConfig, and back to text.

Invariant: `resolve(dump(config)) == config`, and a configuration that `resolve` returns has passed every check that
needs nothing but itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import orjson
import xxhash
from pydantic import JsonValue, ValidationError

from physarum.configs.anchor import anchor_paths
from physarum.configs.engine_defaults import spread
from physarum.configs.errors import ConfigError, Problem, Severity, errors_in
from physarum.configs.machine_counts import counted
from physarum.configs.merge import merge
from physarum.configs.origin import KeyPath, Origins, display_path, dotted
from physarum.configs.overrides import Override, apply_overrides
from physarum.configs.policy_layer import with_policies
from physarum.configs.problems import schema_problems
from physarum.configs.root import RootConfig
from physarum.configs.secrets import is_secret_key
from physarum.configs.semantic import semantic_problems
from physarum.configs.slime_eval import translated as with_slime_eval
from physarum.configs.slime_layer import translated as with_slime_engines
from physarum.configs.yaml_file import Layer, read_yaml, write_yaml

_OPEN_SECTIONS = ("args", "extra", "megatron", "sglang")


def resolve(path: Path | str, overrides: Sequence[Override] = ()) -> RootConfig:
    """Reads `path`, what it extends, and the overrides over it. Raises ConfigError with every problem found."""
    layer = with_policies(counted(apply_overrides(spread(_read_layers(Path(os.path.abspath(path)), ())), overrides)))
    origins = Origins(layer.origins)
    problems = list(_written_secrets(layer.values, (), origins))
    try:
        config = RootConfig.model_validate_json(json.dumps(layer.values))
    except ValidationError as error:
        raise ConfigError([*problems, *schema_problems(error, RootConfig, origins)]) from None
    config = anchor_paths(config, origins).with_origins(origins)
    problems.extend(errors_in(semantic_problems(config)))
    if problems:
        raise ConfigError(problems)
    return config


def dump(config: RootConfig) -> str:
    """The whole configuration as YAML, defaults and absolute paths included."""
    return write_yaml(config.model_dump(mode="json"))


def digest(config: RootConfig) -> str:
    """xxh3-128 of the canonical JSON (sorted keys), 32 hexadecimal digits: equal exactly when the values are."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(config.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS))


def _read_layers(path: Path, below: tuple[Path, ...]) -> Layer:
    """One file merged over those it extends; `below` is the chain of files that led here."""
    if path in below:
        chain = " -> ".join(display_path(file) for file in (*below, path))
        raise ConfigError(
            [_refusal(display_path(path), f"a cycle: {chain}", "a chain that ends", "drop one `extends`")]
        )
    layer = with_slime_engines(with_slime_eval(read_yaml(path)))
    merged = Layer()
    for parent in _parents(layer, path):
        merged = merge(merged, _read_layers(parent, (*below, path)))
    return merge(merged, layer)


def _parents(layer: Layer, path: Path) -> list[Path]:
    """Takes `extends` out of a layer; later files of a list lie over earlier ones."""
    origin = layer.origins.pop(("extends",), None)
    named = layer.values.pop("extends", None)
    names = [] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(name, str) for name in names):
        where = f"{origin}: extends"
        raise ConfigError([_refusal(where, repr(named), "a file name or a list of them", "write `extends: base.yaml`")])
    return [Path(os.path.abspath(path.parent / Path(str(name)).expanduser())) for name in names]


def _written_secrets(value: JsonValue, key: KeyPath, origins: Origins) -> Iterator[Problem]:
    """Secrets written where any key is allowed; elsewhere the schema refuses their keys as unknown."""
    if not isinstance(value, dict):
        return
    for name, item in value.items():
        inside = (*key, name)
        if is_secret_key(name) and any(part in _OPEN_SECTIONS for part in key):
            expected = "no secret in a configuration: it is recorded with the run"
            remedy = f"remove `{dotted(inside)}`; read the secret from an environment variable where it is used"
            yield _refusal(origins.where(inside), "a key that names a secret", expected, remedy)
        yield from _written_secrets(item, inside, origins)


def _refusal(where: str, found: str, expected: str, remedy: str) -> Problem:
    return Problem(Severity.ERROR, where, found, expected, remedy)
