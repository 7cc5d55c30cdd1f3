"""The rows of files, window by window (parts.py). Invariant: a position alone defines its row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from physarum.actors.source.columns import column_names, task_row
from physarum.actors.source.errors import EpochEndError
from physarum.actors.source.packed import PackedLines
from physarum.actors.source.parquet import ParquetRows
from physarum.actors.source.parts import WINDOW_BYTES, Part, Shard, Window, windows
from physarum.actors.source.permutation import Permutation
from physarum.actors.source.ranges import Range, ranges
from physarum.actors.source.segments import SEGMENT_BYTES, OpenFiles, cut
from physarum.configs.data_entries import kind_of
from physarum.configs.rows import ColumnsConfig


class FileRows:
    """Memory holds one window: places of lines (8 bytes each), or the rows of packed and Parquet files."""

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
        files = OpenFiles()
        self._shards = [shard for one in ranges(data) for shard in _shards(one, columns, files, segment_bytes)]
        self._window_bytes = window_bytes
        self._epoch, self._first, self._number = -1, 0, -1
        self._window = Window([])
        self._order: Permutation | None = None
        self._groups: Iterator[list[Part]] = iter(())

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        self._seek(epoch, index)
        local = index - self._first
        place, raw = self._window.row(self._order(local) if self._order is not None else local)
        return task_row(raw, self._columns, place)

    def _seek(self, epoch: int, index: int) -> None:
        """Makes the window of `index` the current one; windows before it are counted on the way."""
        if epoch != self._epoch or index < self._first:
            self._rewind(epoch)
        while index >= self._first + len(self._window):
            self._next()

    def _next(self) -> None:
        """Raises EpochEndError behind the last window."""
        first = self._first + len(self._window)
        group = next(self._groups, None)
        if group is None:
            raise EpochEndError(first)
        self._first, self._number = first, self._number + 1
        self._window = Window(group)
        size = len(self._window)
        mixed = self._shuffle and size > 0
        self._order = Permutation(size, self._seed, "lines", self._epoch, self._number) if mixed else None

    def _rewind(self, epoch: int) -> None:
        self._epoch, self._first, self._number, self._window = epoch, 0, -1, Window([])
        key = (self._seed, "segments", epoch) if self._shuffle else None
        self._groups = windows(self._shards, key, self._window_bytes)
        self._order = None


def _shards(one: Range, columns: ColumnsConfig, files: OpenFiles, segment_bytes: int) -> list[Shard]:
    kind = kind_of(one.path)
    if kind == "parquet":
        return [ParquetRows(one.path, column_names(columns), one.rows)]
    if kind == "jsonl":
        return list(cut(one.path, columns.prompt, files, one.rows, segment_bytes))
    return [PackedLines(one.path, columns.prompt, one.rows)]
