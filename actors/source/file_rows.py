"""The rows of JSONL files, window by window (segments.py). Invariant: as rows.py has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from physarum.actors.source.errors import BlankRowError, EpochEndError, UnusableSourceError
from physarum.actors.source.permutation import Permutation
from physarum.actors.source.rows import checked_row
from physarum.actors.source.segments import (
    SEGMENT_BYTES,
    WINDOW_BYTES,
    Segment,
    Window,
    cut,
    read_line,
    windows,
)
from physarum.configs.data_files import RowError, expand_data, parse_row, unmatched
from physarum.configs.rows import ColumnsConfig

_OPEN_FILES: Final = 64


class FileRows:
    """The rows of JSONL files. Only the lines of the current window are indexed (8 bytes each)."""

    def __init__(
        self,
        data: tuple[Path, ...],
        columns: ColumnsConfig,
        seed: int,
        *,
        shuffle: bool,
        segment_bytes: int = SEGMENT_BYTES,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._columns, self._seed, self._shuffle = columns, seed, shuffle
        self._segments = cut(_files(data), segment_bytes)
        self._window_bytes = window_bytes
        self._files: dict[Path, BinaryIO] = {}
        self._epoch, self._first, self._number = -1, 0, -1
        self._window = Window([])
        self._order: Permutation | None = None
        self._groups: Iterator[list[Segment]] = iter(())

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        self._seek(epoch, index)
        local = index - self._first
        line = self._window.line(self._order(local) if self._order is not None else local)
        text = read_line(self._open(line.path), line.offset)
        if not text.strip():
            raise BlankRowError(f"{line}: blank")
        try:
            parsed = parse_row(text, self._columns.prompt)
        except RowError as error:
            raise RowError(f"{line}: {error}") from error
        names = {"prompt": self._columns.prompt, "label": self._columns.label, "metadata": self._columns.metadata}
        return checked_row({key: parsed[name] for key, name in names.items() if name in parsed}, str(line))

    def _seek(self, epoch: int, index: int) -> None:
        """Makes the window of `index` the current one; windows before it are counted on the way."""
        if epoch != self._epoch or index < self._first:
            self._rewind(epoch)
        while index >= self._first + len(self._window):
            group = next(self._groups, None)
            if group is None:
                raise EpochEndError
            self._first += len(self._window)
            self._number += 1
            self._window = Window(group)
            size = len(self._window)
            mixed = self._shuffle and size > 0
            self._order = Permutation(size, self._seed, "lines", epoch, self._number) if mixed else None

    def _rewind(self, epoch: int) -> None:
        self._epoch, self._first, self._number, self._window = epoch, 0, -1, Window([])
        mixed = self._shuffle and self._segments
        order = Permutation(len(self._segments), self._seed, "segments", epoch) if mixed else None
        self._groups = windows(self._segments, order, self._window_bytes)
        self._order = None

    def _open(self, path: Path) -> BinaryIO:
        """Open files are kept, the oldest closed first."""
        if path not in self._files:
            while len(self._files) >= _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = path.open("rb")
        return self._files[path]


def _files(data: tuple[Path, ...]) -> list[Path]:
    """Files, the files of folders, and what patterns match."""
    entries = [entry / "**" / "*.jsonl" if entry.is_dir() else entry for entry in data]
    for entry in unmatched(entries):
        raise UnusableSourceError(f"{entry} matches no file; expected JSONL files. Correct `data`, or create them")
    return expand_data(entries)
