"""Several origins in one endless stream. Invariant: a position alone defines which part its row comes from, and which row.

Which part comes when is fixed by the weights: in every prefix of n rows each part has its share of n to within one row (the
chairman assignment problem; algorithm and bound 1 - 1 / (2 m - 2) for m parts: Tijdeman, Discrete Mathematics 32, 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from physarum.actors.source.errors import BlankRowError, EpochEndError, UnusableSourceError
from physarum.actors.source.rows import RowStream
from physarum.configs.data_files import RowError

METADATA_KEY: Final = "mixture"


class Schedule:
    """Which part has place n, and which of its own rows that is: periodic in the sum of `weights` (whole numbers)."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.asarray(weights, np.int64)
        self._owners = _period(weights)
        self._ranks = np.zeros(len(self._owners), np.int64)
        for part in range(len(weights)):
            own = self._owners == part
            self._ranks[own] = np.arange(int(own.sum()))

    def at(self, place: int) -> tuple[int, int]:
        """(part, its row counted from 0 over all its epochs)."""
        turn, within = divmod(place, len(self._owners))
        part = int(self._owners[within])
        return part, turn * int(self._weights[part]) + int(self._ranks[within])


def _period(weights: Sequence[int]) -> npt.NDArray[np.int32]:
    """The part at each place of one period [sum of weights]. Of the parts that are due, the one that is overdue first."""
    share = np.asarray(weights, np.int64)
    total, parts = int(share.sum()), len(weights)
    if parts == 1:
        return np.zeros(total, np.int32)
    scale = 2 * parts - 2
    given = np.zeros(parts, np.int64)
    owners = np.zeros(total, np.int32)
    for place in range(total):
        behind = scale * ((place + 1) * share - given * total)
        slack = np.where(behind >= total, ((scale - 1) * total - behind) / share, np.inf)
        owners[place] = chosen = int(np.argmin(slack))
        given[chosen] += 1
    return owners


class MixturePartRows:
    """One part: its rows over and over, each epoch in an order of its own."""

    def __init__(self, name: str, rows: RowStream) -> None:
        self.name, self._rows = name, rows
        self._size: int | None = None
        self._usable = True  # of an epoch that was not seen from its beginning, nobody can say otherwise

    def row(self, number: int) -> dict[str, Any]:
        """Row `number` over all epochs. Raises RowError naming the part, UnusableSourceError after an epoch of nothing."""
        if self._size is None:
            try:
                return self._row(0, number)
            except EpochEndError as end:
                self._size = self._checked(end.rows)
        return self._row(*divmod(number, self._size))

    def _row(self, epoch: int, index: int) -> dict[str, Any]:
        if index == 0:
            if not self._usable:
                raise UnusableSourceError(
                    f"mixture part {self.name}: an epoch without one usable row. Correct its data"
                )
            self._usable = False
        try:
            row = self._rows.row(epoch, index)
        except BlankRowError:
            raise
        except RowError as error:
            raise RowError(f"mixture part {self.name}: {error}") from error
        self._usable = True
        return {**row, "metadata": {**(row.get("metadata") or {}), METADATA_KEY: self.name}}

    def _checked(self, rows: int) -> int:
        if rows == 0:
            raise UnusableSourceError(f"mixture part {self.name} holds no row; expected at least one. Correct its data")
        return rows


class MixtureRows:
    """The parts in turn. Its one epoch has no end, so that an index counts every row ever issued."""

    def __init__(self, parts: Sequence[MixturePartRows], weights: Sequence[int]) -> None:
        self._parts, self._schedule = list(parts), Schedule(weights)

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        part, number = self._schedule.at(index)
        return self._parts[part].row(number)
