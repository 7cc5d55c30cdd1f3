"""The base of every section and the value types that several sections share.

Invariant: sections are frozen, refuse unknown keys, and never coerce: text is not a number, 1.0 is not a count.
Custom refusals carry `expected` and `remedy`, which `problems.py` turns into messages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

from physarum.configs.secrets import is_secret_variable, url_holds_credentials

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_OBJECT_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#]*[^\s?#/][^\s?#]*")


class Section(BaseModel):
    """A part of the configuration: frozen, strict, closed to unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def refuse(expected: str, remedy: str, found: str | None = None) -> PydanticCustomError:
    """An error for a validator to raise; `found` replaces the offending input when that would not be a good message."""
    return PydanticCustomError(
        "refused", "expected {expected}", {"expected": expected, "remedy": remedy, "found": found}
    )


def require_exactly_one(section: Section, names: tuple[str, ...]) -> None:
    """Raises unless exactly one of the optional fields `names` is set."""
    present = [name for name in names if getattr(section, name) is not None]
    if len(present) != 1:
        listed = ", ".join(f"`{name}`" for name in names)
        raise refuse(
            expected=f"exactly one of {listed}",
            remedy="keep one of them and remove the others" if present else "add one of them",
            found=" and ".join(f"`{name}`" for name in present) or "none of them",
        )


def _one_or_more(value: Any) -> Any:
    """A text as a tuple of one; an empty list is refused."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not items:
        raise refuse("one text, or a list of at least one", "write at least one item")
    return tuple(items)


def _check_environment(value: Any) -> Any:
    """Validates variable names and turns numbers into text, as a shell would."""
    if not isinstance(value, dict):
        raise refuse("a mapping of variable names to values", "write `env: {NAME: value}`")
    return {name: _variable_value(name, item) for name, item in value.items()}


def _variable_value(name: str, value: Any) -> str:
    if not _VARIABLE.fullmatch(name):
        raise refuse("variable names of A-Z, 0-9 and _", f"rename {name!r}", found=f"variable {name!r}")
    if is_secret_variable(name):
        raise refuse(
            "variables that are not secret",
            f"remove {name} here and export it before the start; `env` is recorded with the run",
            found=f"variable {name}, which looks like a secret",
        )
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise refuse("text or a number", f'quote the value: `{name}: "..."`', found=f"{name}={value!r}")
    return str(value)


def _check_devices(value: Any) -> Any:
    """A count, or distinct device indices."""
    expected = "a number of devices, or a list of distinct device indices"
    remedy = "write for example `gpus: 2` or `gpus: [0, 1]`"
    items = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
        raise refuse(expected, remedy)
    if len(set(items)) != len(items):
        raise refuse(expected, remedy)
    return tuple(items) if isinstance(value, list) else value


def _check_bus_url(value: Any) -> Any:
    return _check_url(value, ("nats", "tls", "ws", "wss"), "nats://host:4222")


def _check_http_url(value: Any) -> Any:
    return _check_url(value, ("http", "https"), "http://host:30000")


def _check_url(value: Any, schemes: tuple[str, ...], example: str) -> Any:
    if not isinstance(value, str):
        raise refuse(f"a URL such as {example}", "write the URL as text")
    if url_holds_credentials(value):
        raise refuse(
            "a URL without user or password", "move them to variables named by *_env keys", found="credentials"
        )
    parts = urlsplit(value)
    if parts.scheme not in schemes or not parts.hostname:
        raise refuse(f"a URL such as {example}", f"use one of the schemes {', '.join(schemes)} and name a host")
    return value


def _check_object_url(value: Any) -> Any:
    expected, example = "the URL of a folder in an object store", "s3://bucket/prefix"
    if not isinstance(value, str):
        raise refuse(expected, f"write it as text, for example {example}")
    if url_holds_credentials(value):
        raise refuse(
            "a URL without user or password",
            "leave them to the environment, where the store's client looks",
            "credentials",
        )
    if not _OBJECT_URL.fullmatch(value) or "::" in value:
        raise refuse(expected, f"name the scheme, the bucket and a prefix, for example {example}")
    if value.startswith("memory:"):
        raise refuse("a store that outlives its process", f"use another scheme, for example {example}")
    return value


Name: TypeAlias = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]
"""Run, group, source and policy names: they become parts of NATS subjects and of folder names."""
VariableName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")]
"""The name of an environment variable, never its value."""
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Natural: TypeAlias = Annotated[int, Field(ge=0)]
Bytes: TypeAlias = Annotated[int, Field(ge=1)]
Port: TypeAlias = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0 lets the system choose."""
Dtype: TypeAlias = Literal["float32", "bfloat16"]
Arguments: TypeAlias = dict[str, JsonValue]
"""Keyword arguments passed through to a hook or a program."""
Environment: TypeAlias = Annotated[dict[str, str], BeforeValidator(_check_environment)]
"""Non-secret variables of a role's processes, recorded with the run."""
Devices: TypeAlias = Annotated[int | tuple[int, ...], BeforeValidator(_check_devices)]
"""The accelerators of a whole group: how many, or which indices. Its instances share them equally."""
BusUrl: TypeAlias = Annotated[str, BeforeValidator(_check_bus_url)]
ObjectUrl: TypeAlias = Annotated[str, BeforeValidator(_check_object_url)]
"""A folder in an object store, of any scheme that fsspec knows; one store, not a chain of them (`::`)."""
HttpUrl: TypeAlias = Annotated[str, BeforeValidator(_check_http_url)]
Files: TypeAlias = Annotated[tuple[Annotated[Path, Field(strict=False)], ...], BeforeValidator(_one_or_more)]
"""Paths or glob patterns, written as a list or as one text."""
HttpUrls: TypeAlias = Annotated[tuple[HttpUrl, ...], BeforeValidator(_one_or_more)]
"""URLs, written as a list or as one text."""
