"""The nearest known name for a key that is not known, looked up in the schema itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from physarum.configs.origin import KeyPath, dotted


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name` (dashes and underscores count as the same), or None when none is like it."""
    by_spelling = {candidate.replace("-", "_").lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.replace("-", "_").lower(), by_spelling, n=1, cutoff=0.6)
    return by_spelling[found[0]] if found else None


def suggest_key(root: type[BaseModel], key: KeyPath) -> str | None:
    """A known dotted key for the unknown `key`: alike in its own section, or of the same name elsewhere."""
    section, name = key[:-1], str(key[-1])
    owner = model_at(root, section)
    if owner is not None and (found := nearest(name, owner.model_fields)) is not None:
        return dotted((*section, found))
    same = sorted((known for known in known_keys(root) if known.rpartition(".")[2] == name), key=_depth)
    alone = len(same) == 1 or (len(same) > 1 and _depth(same[0]) < _depth(same[1]))
    return same[0] if alone else None


def _depth(known: str) -> int:
    """The key nearest to the top is meant, where one is nearer than all others."""
    return known.count(".")


def model_at(root: type[BaseModel], key: KeyPath) -> type[BaseModel] | None:
    """The section class at `key`, or None where the schema is open or ends."""
    current: type[BaseModel] = root
    parts = iter(key)
    for part in parts:
        field = current.model_fields.get(str(part))
        inner = _section_in(field.annotation) if field is not None else None
        if field is None or inner is None:
            return None
        if _place_inside(field.annotation) and next(parts, None) is None:
            return None
        current = inner
    return current


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema; the names of groups are written `<group>`."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        if (inner := _section_in(field.annotation)) is not None:
            yield from known_keys(inner, f"{prefix}{name}.{_place_inside(field.annotation)}")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside `Section`, `Section | None`, `dict[str, Section]` or `tuple[Section, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part)) is not None), None)


def _place_inside(annotation: Any) -> str:
    """What stands between a field and the keys of its sections, where it holds several."""
    return {dict: "<group>.", tuple: "<number>."}.get(get_origin(annotation), "")
