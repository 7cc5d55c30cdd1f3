"""How many steps an optimizer had made, from the `common.pt` of a Megatron folder: a pickle, read without running anything.

Invariant: whatever the file names becomes an inert object: nothing is imported or called. Plain values (dicts, lists, text,
numbers) are what they are, and those of the optimizer's groups are all that is looked for.
"""

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE = "common.pt"
_PICKLE = "/data.pkl"


def optimizer_steps(folder: Path) -> int | None:
    """`step` of the optimizer's parameter groups, where all that say one say the same. None: the folder does not tell."""
    found = {step for tree in _trees(folder) for step in _steps(tree)}
    return found.pop() if len(found) == 1 else None


class _Inert:
    """Stands for an object of any class, and for what any function would return."""

    def __new__(cls, *_args: Any, **_options: Any) -> "_Inert":
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return dict if (module, name) == ("collections", "OrderedDict") else _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None


def _trees(folder: Path) -> Iterator[Any]:
    """The one tree of the file, if it is there and readable."""
    try:
        with zipfile.ZipFile(folder / _FILE) as archive:
            name = next(one for one in archive.namelist() if one.endswith(_PICKLE))
            with archive.open(name) as file:
                yield _Unpickler(file).load()
    except (OSError, StopIteration, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, TypeError, ValueError):
        return


def _steps(node: Any) -> Iterator[int]:
    if isinstance(node, dict):
        for group in node.get("param_groups") or ():
            step = group.get("step") if isinstance(group, dict) else None
            if isinstance(step, int) and not isinstance(step, bool):
                yield step
        for value in node.values():
            yield from _steps(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _steps(value)
