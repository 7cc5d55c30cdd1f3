"""Rows by (epoch, index), here those of a hook. Invariant: a position alone defines its row.

Nothing random is kept between rows, so a source that starts again at a position issues what it would have issued.
"""

from __future__ import annotations

from typing import Any, Protocol

from physarum.actors.source.errors import EpochEndError
from physarum.actors.source.permutation import Permutation
from physarum.actors.source.tasks import check_sampling
from physarum.configs.data_files import RowError
from physarum.configs.hooks import Hook, Rows, check_rows, check_signature, load_hook
from physarum.configs.types import Arguments


class RowStream(Protocol):
    """Where a source takes its rows from. Called from one thread at a time."""

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Keys `prompt`, `label`, `metadata`. Raises EpochEndError past the last index, RowError for a broken row."""
        ...


class HookRows:
    """The rows of a user's hook, which is called `(seed, **args)` once."""

    def __init__(self, hook: Hook, seed: int, args: Arguments, *, shuffle: bool) -> None:
        target = load_hook(hook)
        check_signature(target, ["seed"], hook, args)
        made = target(seed, **args)  # type: ignore[operator]  # check_signature: it can be called like this
        check_rows(made, hook)
        self._hook, self._seed, self._shuffle = hook, seed, shuffle
        self._rows: Rows = made
        self._order: tuple[int, int, Permutation] | None = None

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        size = len(self._rows)
        if index >= size:
            raise EpochEndError(size)
        at = self._permutation(epoch, size)(index) if self._shuffle else index
        try:
            row = self._rows.row(epoch, at)
        except Exception as error:  # user code may raise anything; the row is named, skipped and counted
            raise RowError(f"{self._hook}: row({epoch}, {at}) raised {type(error).__name__}: {error}") from error
        return checked_row(row, f"{self._hook}: row({epoch}, {at})")

    def _permutation(self, epoch: int, size: int) -> Permutation:
        if self._order is None or self._order[:2] != (epoch, size):
            self._order = (epoch, size, Permutation(size, self._seed, "rows", epoch))
        return self._order[2]


def checked_row(row: object, place: str) -> dict[str, Any]:
    """The row when it can be a task. Raises RowError naming its place and what is missing."""
    if not isinstance(row, dict):
        raise RowError(f"{place}: {type(row).__name__}; expected a mapping with `prompt`")
    if "prompt" not in row:
        raise RowError(f"{place}: no `prompt`; found {', '.join(map(str, row)) or 'no keys'}")
    if not isinstance(row.get("metadata") or {}, dict):
        raise RowError(f"{place}: `metadata` is {type(row['metadata']).__name__}; expected a mapping")
    check_sampling(row.get("metadata") or {}, place)
    return row
