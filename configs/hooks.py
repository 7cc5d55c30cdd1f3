"""Hooks: the user's functions, named in the configuration and imported where they run.

A hook is written `package.module:attribute` or `path/to/file.py:attribute` (paths are anchored by the loader at the
folder of the file that names them). Invariant: whatever goes wrong while a hook is imported or inspected becomes a
HookError that names the hook, and for a raise the file and line of it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self, runtime_checkable

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from physarum.configs.errors import HookError

_IDENTIFIERS = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_HOOK = re.compile(rf"(?:{_IDENTIFIERS}|[^:]+\.py):{_IDENTIFIERS}")
_FORM = "`package.module:attribute` or `path/to/file.py:attribute`"


class Hook(str):
    """A validated hook name. Its two parts are `source` (module or file) and `attribute` (may be dotted)."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        if not _HOOK.fullmatch(text):
            raise HookError(text, "a malformed name", _FORM, "write module and attribute with one colon")
        return super().__new__(cls, text)

    @property
    def source(self) -> str:
        """The dotted module name, or the path of a Python file."""
        return self.rpartition(":")[0]

    @property
    def attribute(self) -> str:
        """The attribute inside the module."""
        return self.rpartition(":")[2]

    @property
    def is_file(self) -> bool:
        """Whether the hook lives in a file named by its path."""
        return self.source.endswith(".py")

    def anchored(self, folder: Path) -> Hook:
        """The same hook with its file path made absolute against `folder`; module hooks are returned as they are."""
        if not self.is_file:
            return self
        return Hook(f"{os.path.abspath(folder / Path(self.source).expanduser())}:{self.attribute}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            _validated, core_schema.str_schema(), serialization=core_schema.to_string_ser_schema()
        )


def _validated(text: str) -> Hook:
    try:
        return Hook(text)
    except HookError as error:
        context = {"expected": f"a hook, {error.expected}", "remedy": error.remedy}
        raise PydanticCustomError("refused", "expected {expected}", context) from None


def load_hook(hook: str) -> object:
    """Imports the hook's module and returns its attribute. Raises HookError."""
    parsed = Hook(hook)
    target: object = _load_file(parsed) if parsed.is_file else _load_module(parsed)
    seen = parsed.source
    for part in parsed.attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise _missing_attribute(parsed, target, part, seen) from None
        seen = f"{seen}:{part}" if seen == parsed.source else f"{seen}.{part}"
    return target


def _missing_attribute(hook: Hook, owner: object, part: str, seen: str) -> HookError:
    near = difflib.get_close_matches(part, [name for name in dir(owner) if not name.startswith("_")], n=1)
    remedy = f"did you mean `{near[0]}`?" if near else "define it there or correct the name"
    return HookError(hook, f"no `{part}` in {seen}", f"{seen} to define `{part}`", remedy.rstrip("."))


def _load_module(hook: Hook) -> ModuleType:
    try:
        return importlib.import_module(hook.source)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if hook.source == missing or hook.source.startswith(f"{missing}."):
            raise HookError(
                hook,
                f"no module `{missing}`",
                "an importable module",
                "correct the name, install it, or set PYTHONPATH",
            ) from error
        raise _raised(hook, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(hook, error) from error


def _load_file(hook: Hook) -> ModuleType:
    """Imports a file once per process under a name made of its path, so that two files never collide."""
    path = os.path.abspath(hook.source)
    name = f"physarum_hook_{Path(path).stem}_{hashlib.blake2s(path.encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise HookError(hook, f"no file {path}", "a Python file", "correct the path or create the file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised(hook, error) from error
    return module


def _raised(hook: Hook, error: BaseException) -> HookError:
    """The error for an import that raised, naming the innermost frame (or the place of a syntax error)."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
    return HookError(
        hook, f"{type(error).__name__} at {place}: {error}", "an import without an error", f"correct {place}"
    )


def check_signature(fn: object, params: Sequence[str], hook: str, args: Iterable[str] = ()) -> None:
    """Raises HookError unless `fn` can be called with `params` by position and `args` by keyword.

    `params` are the names that the role passes in this order; the hook may name them otherwise.
    """
    wanted = f"a callable ({', '.join([*params, *(f'{name}=...' for name in args)])})"
    if not callable(fn):
        raise HookError(hook, f"{type(fn).__name__}, which cannot be called", wanted, "name a function or a class")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # builtins that carry no signature
        raise HookError(hook, "a callable without a signature", wanted, "wrap it in a Python function") from None
    try:
        signature.bind(*params, **dict.fromkeys(args))
    except TypeError as error:
        remedy = "change the function's parameters, or the `args` of the section that names it"
        raise HookError(hook, f"{_name_of(fn)}{signature} ({error})", wanted, remedy) from None


def check_async(fn: object, hook: str) -> None:
    """Raises HookError unless calling `fn` gives a coroutine."""
    if not (inspect.iscoroutinefunction(fn) or (callable(fn) and inspect.iscoroutinefunction(type(fn).__call__))):
        raise HookError(
            hook, f"{_name_of(fn)}, which is not async", "an `async def` function", "declare it `async def`"
        )


def _name_of(fn: object) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


@runtime_checkable
class Rows(Protocol):
    """What a source hook returns: rows addressed by epoch and index, so that any position can be reproduced."""

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """The row at `index` (0 <= index < len) of `epoch` (0, 1, ...)."""
        ...

    def __len__(self) -> int:
        """Rows in one epoch."""
        ...


def check_rows(candidate: object, hook: str) -> None:
    """Raises HookError unless `candidate`, made by a source hook (or the class it would make), satisfies `Rows`."""
    wanted = "an object with `row(epoch, index) -> dict` and `__len__`"
    remedy = "give the returned object both methods"
    is_class = inspect.isclass(candidate)
    conforms = issubclass(candidate, Rows) if isinstance(candidate, type) else isinstance(candidate, Rows)
    if not conforms:
        name = candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__
        raise HookError(hook, f"{name} without them", wanted, remedy)
    row: Callable[..., object] = candidate.row  # type: ignore[attr-defined]
    check_signature(row, ["self", "epoch", "index"] if is_class else ["epoch", "index"], f"{hook}().row")
