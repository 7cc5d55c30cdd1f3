"""What can be wrong with a source's rows."""

from __future__ import annotations

from physarum.actors.errors import UnrecoverableError
from physarum.configs.data_files import RowError


class UnusableSourceError(UnrecoverableError):
    """No task can be made of the rows: no file, no row, or nothing but broken rows."""


class EpochEndError(Exception):
    """There is no row at this index: the epoch ends before it, after `rows` (blank and broken ones included)."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"an epoch of {rows} rows")
        self.rows = rows


class BlankRowError(RowError):
    """A blank line: no row, and nothing wrong."""


class StageGoneError(UnrecoverableError):
    """A curriculum is asked about a task whose stage it does not know: the position does not hold what was issued."""


class ChangedCurriculumError(UnrecoverableError):
    """A curriculum skips a row that it has let be issued under the same state: it is no pure function."""
