"""Turns the refusals of the schema into messages for people.

Invariant: one Problem for every refusal, each with the line it was written in; a secret's value is never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath, Origins, dotted
from physarum.configs.secrets import is_secret_key
from physarum.configs.suggest import model_at, suggest_key

_MOVED: Mapping[KeyPath, str] = {
    ("megatron",): "move these fields under `trainer.megatron:`",
    ("sglang",): "move these arguments under `engines.<group>.sglang:`",
}
_EXPECTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "bool_type": lambda c: "true or false",
    "dict_type": lambda c: "a mapping",
    "float_type": lambda c: "a number",
    "greater_than": lambda c: f"a number above {c['gt']}",
    "greater_than_equal": lambda c: f"a number of at least {c['ge']}",
    "int_from_float": lambda c: "a whole number",
    "int_type": lambda c: "a whole number",
    "less_than": lambda c: f"a number below {c['lt']}",
    "less_than_equal": lambda c: f"a number of at most {c['le']}",
    "literal_error": lambda c: str(c["expected"]),
    "model_type": lambda c: "a mapping",
    "path_type": lambda c: "a path",
    "string_pattern_mismatch": lambda c: f"text that matches {c['pattern']}",
    "string_type": lambda c: "text",
    "too_long": lambda c: f"at most {c['max_length']} items",
    "too_short": lambda c: f"at least {c['min_length']} of them",
    "tuple_type": lambda c: "a list",
}


def schema_problems(
    error: ValidationError, root: type[BaseModel], origins: Origins, prefix: KeyPath = ()
) -> list[Problem]:
    """One problem for each refusal in `error`; `prefix` is where `root` lies inside the whole configuration."""
    return [_problem(details, root, origins, prefix) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, root: type[BaseModel], origins: Origins, prefix: KeyPath) -> Problem:
    local = _key_of(details["loc"])
    key = prefix + local
    if details["type"] == "extra_forbidden":
        return _unknown_key(root, local, prefix, origins)
    if details["type"] == "missing":
        return _missing(key, origins)
    context = details.get("ctx", {})
    found = context.get("found") or _shown(key, details["input"])
    expected = context["expected"] if details["type"] == "refused" else _expected(details)
    remedy = context.get("remedy") or f"write {expected} at `{dotted(key)}`"
    return Problem(Severity.ERROR, _where(origins, key), found, expected, remedy)


def _key_of(location: tuple[int | str, ...]) -> KeyPath:
    """The place in the file: without pydantic's mark for "the key itself was refused"."""
    return location[:-1] if location and location[-1] == "[key]" else location


def _where(origins: Origins, key: KeyPath) -> str:
    origin = origins.nearest(key)
    name = dotted(key)
    if origin is None:
        return name
    return f"{origin}: {name}" if name else str(origin)


def _unknown_key(root: type[BaseModel], local: KeyPath, prefix: KeyPath, origins: Origins) -> Problem:
    name = str(local[-1])
    section = dotted(prefix + local[:-1]) or "the top level"
    expected = f"a key of {section}"
    if prefix + local in _MOVED:
        remedy = _MOVED[prefix + local]
    elif is_secret_key(name):
        remedy = f"remove the value and name an environment variable: `{name}_env: VARIABLE`"
    elif (near := suggest_key(root, local)) is not None:
        remedy = f"did you mean `{dotted((*prefix, near))}`"
    else:
        owner = model_at(root, local[:-1])
        known = ", ".join(owner.model_fields) if owner is not None else "none"
        remedy = f"remove it, or use one of: {known}"
    return Problem(Severity.ERROR, _where(origins, prefix + local), f"unknown key `{name}`", expected, remedy)


def _missing(key: KeyPath, origins: Origins) -> Problem:
    found, expected = "nothing", f"the key `{dotted(key)}`"
    return Problem(Severity.ERROR, _where(origins, key), found, expected, f"add `{dotted(key)}`")


def _expected(details: ErrorDetails) -> str:
    describe = _EXPECTED.get(details["type"])
    return details["msg"] if describe is None else describe(details.get("ctx", {}))


def _shown(key: KeyPath, value: object) -> str:
    """The offending value with its kind, shortened; hidden where it could be a secret."""
    name = str(key[-1]) if key else ""
    if is_secret_key(name) or name.endswith("_env"):
        return "a value that is not shown"
    text = repr(value)
    kinds = {str: "text", bool: "truth value", int: "number", float: "number", dict: "mapping", list: "list"}
    kind = kinds.get(type(value))
    shortened = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{shortened} ({kind})" if kind else {None: "null"}.get(value, shortened)  # type: ignore[call-overload]
