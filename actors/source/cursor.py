"""The next row that can be a task. Broken rows are skipped, counted, and the first of them named in the log."""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from physarum.actors.source.errors import BlankRowError, EpochEndError, UnusableSourceError
from physarum.actors.source.rows import RowStream
from physarum.configs.data_files import RowError

_log = logging.getLogger(__name__)

_NAMED: Final = 20


class Picked(msgspec.Struct, frozen=True):
    """A row and its position."""

    epoch: int
    index: int
    row: dict[str, Any]


class RowCursor:
    """Walks over rows from a position. `broken` counts the rows that were skipped."""

    def __init__(self, rows: RowStream, epoch: int, index: int, epochs: int | None) -> None:
        self._rows, self._epochs = rows, epochs
        self.epoch, self.index = epoch, index
        self.broken = 0
        self._usable = index > 0  # what came before a resumed position was usable, or somebody has said so
        self._named: set[str] = set()

    def take(self) -> Picked | None:
        """The next usable row; None after the last epoch. Reads files or calls the hook: keep it off the event loop.

        Raises UnusableSourceError for an epoch without one usable row.
        """
        while self._epochs is None or self.epoch < self._epochs:
            try:
                picked = Picked(self.epoch, self.index, self._rows.row(self.epoch, self.index))
            except EpochEndError:
                self._next_epoch()
                continue
            except BlankRowError:
                self.index += 1
                continue
            except RowError as error:
                self.index += 1
                self.skip(str(error))
                continue
            self.index += 1
            self._usable = True
            return picked
        return None

    def skip(self, reason: str) -> None:
        """Counts a row that is not issued."""
        self.broken += 1
        if reason not in self._named and len(self._named) < _NAMED:
            self._named.add(reason)
            _log.warning("row skipped: %s", reason)
            if len(self._named) == _NAMED:
                _log.warning("%d different broken rows were named; further ones are only counted", _NAMED)

    def _next_epoch(self) -> None:
        if not self._usable:
            raise UnusableSourceError(
                f"epoch {self.epoch} of {self.index} rows holds no usable one ({self.broken} are broken);"
                " expected rows with a prompt. Correct the data: `actorctl check` names the lines"
            )
        self.epoch, self.index, self._usable = self.epoch + 1, 0, False
