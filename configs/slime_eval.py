"""slime's evaluation file (`--eval-config`) read as `evaluation.sets`: `extends: [run.yaml, slime_eval.yaml]`.

    eval: {defaults: {...}, datasets: [{name, path, n_samples_per_eval_prompt, temperature, input_key, rm_type, ...}]}

Invariant: each key is translated or refused by name; what a data set does not say, `eval.defaults` says.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from pydantic import JsonValue

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.origin import KeyPath, Origin, Origins
from physarum.configs.yaml_file import Layer

_KEY: Final = "eval"
_SAMPLING: Final = {"top_p": "top_p", "top_k": "top_k", "max_response_len": "max_new_tokens"}
_COLUMNS: Final = {"input_key": "prompt", "label_key": "label", "tool_key": "tools", "metadata_key": "metadata"}
_FURTHER: Final = ("name", "path", "n_samples_per_eval_prompt", "temperature", "rm_type", "metadata_overrides")
_KNOWN: Final = frozenset((*_SAMPLING, *_COLUMNS, *_FURTHER))


def translated(layer: Layer) -> Layer:
    """The layer itself where it has no `eval`. Raises ConfigError naming every key that has no counterpart here."""
    if _KEY not in layer.values:
        return layer
    origins, problems = Origins(layer.origins), list[Problem]()
    sets: dict[str, JsonValue] = {}
    places = {key: origin for key, origin in layer.origins.items() if key[:1] != (_KEY,)}
    for key, dataset in _datasets(layer.values[_KEY], origins, problems):
        name = re.sub(r"[^a-z0-9-]+", "-", str(dataset.get("name")).lower()).strip("-") or "unnamed"
        if name in sets:
            found = f"`{dataset.get('name')}`, which is `evaluation.sets.{name}` as another one is"
            _refuser(origins, problems)(
                key, found, "names that differ in letters a to z and digits", "rename one of them"
            )
        sets[name] = _set(dataset)
        _note(places, ("evaluation", "sets", name), sets[name], origins.nearest(key))
    if problems:
        raise ConfigError(problems)
    values = {name: value for name, value in layer.values.items() if name != _KEY}
    below = values.get("evaluation")
    values["evaluation"] = {**(below if isinstance(below, dict) else {}), "sets": sets}
    places.setdefault(("evaluation",), layer.origins[_KEY,])
    return Layer(values, places)


def _datasets(value: JsonValue, origins: Origins, problems: list[Problem]) -> list[tuple[KeyPath, dict[str, Any]]]:
    """Every data set over the defaults; what is wrong goes into `problems`."""
    refuse = _refuser(origins, problems)
    datasets = value.get("datasets") if isinstance(value, dict) else None
    defaults = value.get("defaults") or {} if isinstance(value, dict) else {}
    if not isinstance(datasets, list) or not datasets or not isinstance(defaults, dict):
        refuse((_KEY,), "no list `eval.datasets`", "slime's evaluation file", "write data sets with `name` and `path`")
        return []
    found: list[tuple[KeyPath, dict[str, Any]]] = []
    for index, dataset in enumerate(datasets):
        key: KeyPath = (_KEY, "datasets", index)
        if not isinstance(dataset, dict) or not {"name", "path"} <= dataset.keys():
            refuse(key, "a data set without `name` or `path`", "both", "add what is missing")
            continue
        for name in (*defaults, *dataset):
            if name not in _KNOWN:
                remedy = (
                    "remove it, and write `evaluation.sets` (docs/data.md), whose `generate` and `reward` are hooks"
                )
                where: KeyPath = (*key, name) if name in dataset else (_KEY, "defaults", name)
                refuse(where, f"`{name}`", f"one of {', '.join(sorted(_KNOWN))}", remedy)
        found.append((key, {**defaults, **dataset}))
    return found


def _set(dataset: dict[str, Any]) -> dict[str, JsonValue]:
    samples = dataset.get("n_samples_per_eval_prompt", 1)
    metadata = dict(dataset.get("metadata_overrides") or {})
    if dataset.get("rm_type") is not None:
        metadata["rm_type"] = dataset["rm_type"]
    found: dict[str, JsonValue] = {
        "data": dataset["path"],
        "problems": None,
        "samples": samples,
        "pass_at": _powers(samples),
        "metadata": metadata,
    }
    sampling = {ours: dataset[theirs] for theirs, ours in _SAMPLING.items() if dataset.get(theirs) is not None}
    if dataset.get("temperature") is not None:
        greedy = dataset["temperature"] == 0
        sampling |= {"top_k": 1} if greedy else {"temperature": dataset["temperature"]}
    columns = {ours: dataset[theirs] for theirs, ours in _COLUMNS.items() if dataset.get(theirs) is not None}
    return found | ({"sampling": sampling} if sampling else {}) | ({"columns": columns} if columns else {})


def _powers(samples: Any) -> list[JsonValue]:
    """1, 2, 4, ... as slime reports them; none for one sample, or for what is no number (the schema then says so)."""
    if not isinstance(samples, int) or samples < 2:
        return []
    return [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]


def _refuser(origins: Origins, problems: list[Problem]) -> Callable[[KeyPath, str, str, str], None]:
    def refuse(key: KeyPath, found: str, expected: str, remedy: str) -> None:
        problem = Problem(Severity.ERROR, origins.where(key), found, expected, remedy)
        if problem not in problems:
            problems.append(problem)

    return refuse


def _note(places: dict[KeyPath, Origin], key: KeyPath, value: JsonValue, origin: Origin | None) -> None:
    """Everything that came of a data set was written where it is."""
    if origin is None:
        return
    places[key] = origin
    for name, item in value.items() if isinstance(value, dict) else ():
        _note(places, (*key, name), item, origin)
