"""Which modules of a model a quantization_config means: names and patterns as SGLang's loaders match them.

Two libraries, two rules: `fp8` compares whole parts of dotted paths, compressed-tensors compares whole names, the end of a
name, or a pattern after `re:`. Experts are one layer in an engine: all of them are matched as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

HEAD: Final = "lm_head"
_NEVER: Final = ("embed_tokens", "wte", "gate", "router", "shared_expert_gate")
"""Last parts of names of 2-D weights that engines hold unquantised whatever the configuration says: embeddings, routers."""
_EXPERTS: Final = re.compile(r"^(.*\.experts)\.\d+(\..+)$")


def is_linear(module: str) -> bool:
    """Whether a 2-D weight of this module is a linear layer's that engines can hold quantised (the head apart)."""
    return module.rpartition(".")[2] not in _NEVER


def on_paths(module: str, entries: Iterable[str]) -> bool:
    """The rule of `fp8` (sglang is_layer_skipped): an entry is part of the dotted path, with or without `model.` before it."""
    match = _EXPERTS.match(module)
    path = match.group(1) if match else module
    bare = [entry.strip(".").removeprefix("model.") for entry in entries]
    if any(f".{one}." in f".{path}." for one in bare):
        return True
    return match is not None and any("experts" in one and path.removeprefix("model.") in one for one in bare)


def named(module: str, entries: Iterable[str]) -> bool:
    """The rule of compressed-tensors (sglang check_equal_or_regex_match). Raises re.error."""
    return first_named(module, entries) is not None


def first_named(module: str, entries: Iterable[str]) -> str | None:
    """The first entry that means this module by its name."""
    match = _EXPERTS.match(module)
    name = f"{match.group(1)}.0{match.group(2)}" if match else module
    return next((entry for entry in entries if _means(entry, name)), None)


def bad_patterns(entries: Sequence[str]) -> list[str]:
    """Entries after `re:` that are no regular expressions."""
    found = []
    for entry in entries:
        if entry.startswith("re:"):
            try:
                re.compile(entry.removeprefix("re:"))
            except re.error:
                found.append(entry)
    return found


def _means(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return entry == name or name.endswith(f".{entry}")
