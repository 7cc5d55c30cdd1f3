"""Parquet files: one row group in memory at a time, or a chunk of it where it is large; only the columns that are used.

Row groups of a file are visited in a seeded order. One that is larger than CHUNK_BYTES or CHUNK_ROWS is read forwards in chunks
(rows are shuffled within those), since its pages cannot be addressed. Footers are read as files are visited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from physarum.actors.source.errors import UnusableSourceError
from physarum.actors.source.parts import HELD_WEIGHT, Key, OpenPart, Part
from physarum.actors.source.permutation import Permutation
from physarum.agents.attachments import referred
from physarum.configs.data_files import UNREADABLE, RowError, has_column

CHUNK_BYTES: Final = 32 << 20
"""Unpacked, of the columns that are used."""
CHUNK_ROWS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """A file, or its `rows` (from 0) alone: a shard. `columns`: names as in the configuration, `prompt` the first."""

    path: Path
    columns: tuple[str, ...]
    rows: range | None = None
    chunk_bytes: int = CHUNK_BYTES
    chunk_rows: int = CHUNK_ROWS

    def parts(self, key: Key | None) -> Iterator[Part]:
        file = _opened(self.path)
        names = _wanted(self, file.schema_arrow.names)
        count, firsts = file.num_row_groups, _firsts(file)
        order = Permutation(count, *key, "groups") if key is not None and count else None
        for place in range(count):
            group = place if order is None else order(place)
            part = _group(self, file, names, group, firsts[group])
            if part is not None:
                yield from _chunks(self, file, part)


@dataclass(slots=True)
class _Group:
    """Rows [start, stop) of row group `number`; the group begins with row `first` of the file. Its own open form.

    The file is opened where it is read: a window may hold groups of thousands.
    """

    path: Path
    names: list[str]
    prompt: str
    number: int
    first: int
    start: int
    stop: int
    size: int
    table: Any = None

    @property
    def weight(self) -> int:
        return HELD_WEIGHT * self.size

    def open(self) -> OpenPart:
        return self

    def __len__(self) -> int:
        return self.stop - self.start

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        number = self.first + self.start + index
        if self.table is None:
            self.table = self._read(number)
        return _row(self.table, self.start + index, self.path, number, self.prompt)

    def _read(self, number: int) -> Any:
        try:
            return _opened(self.path).read_row_group(self.number, columns=self.names, use_threads=False)
        except UNREADABLE as error:
            raise RowError(f"{self.path} row {number}: its row group cannot be read ({error})") from error


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A record batch whose first row is `first` of the file. Its own open form."""

    path: Path
    prompt: str
    first: int
    batch: Any

    @property
    def weight(self) -> int:
        return HELD_WEIGHT * int(self.batch.nbytes)

    def open(self) -> OpenPart:
        return self

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        return _row(self.batch, index, self.path, self.first + index, self.prompt)


def count_parquet(path: Path, limit: int | None = None) -> int:
    """Rows, from the footer."""
    return int(_opened(path).metadata.num_rows)


def _opened(path: Path) -> Any:
    from pyarrow import parquet  # only where there are such files

    try:
        return parquet.ParquetFile(path, memory_map=True)
    except UNREADABLE as error:
        raise UnusableSourceError(
            f"{path} cannot be read as Parquet ({error}); expected a whole file. Make it again, or take it out of `data`"
        ) from error


def _wanted(shard: ParquetRows, names: list[str]) -> list[str]:
    """The columns to read. Raises UnusableSourceError where there is none for the prompt."""
    roots = [name if name in names else name.partition(".")[0] for name in shard.columns]
    if roots[0] not in names:
        raise UnusableSourceError(
            f"{shard.path} has no column `{shard.columns[0]}`; found {', '.join(names) or 'none'}. Name the prompt's column in"
            " `source.columns.prompt`"
        )
    return [name for name in dict.fromkeys(roots) if name in names]


def _firsts(file: Any) -> list[int]:
    """The row of the file with which each row group begins, and behind the last."""
    found = [0]
    for group in range(file.num_row_groups):
        found.append(found[-1] + file.metadata.row_group(group).num_rows)
    return found


def _group(shard: ParquetRows, file: Any, names: list[str], number: int, first: int) -> _Group | None:
    """The part of a row group that belongs to the shard; None where nothing does."""
    meta = file.metadata.row_group(number)
    rows = shard.rows or range(first + meta.num_rows)
    start, stop = max(rows.start - first, 0), min(rows.stop - first, meta.num_rows)
    if start >= stop:
        return None
    columns = (meta.column(index) for index in range(meta.num_columns))
    size = sum(one.total_uncompressed_size for one in columns if one.path_in_schema.startswith(tuple(names)))
    return _Group(shard.path, names, shard.columns[0], number, first, start, stop, size)


def _chunks(shard: ParquetRows, file: Any, part: _Group) -> Iterator[Part]:
    """The group itself, or its chunks where it is large."""
    total = file.metadata.row_group(part.number).num_rows
    if part.size <= shard.chunk_bytes and total <= shard.chunk_rows:
        yield part
        return
    step = max(1, min(shard.chunk_rows, total * shard.chunk_bytes // max(1, part.size)))
    at = 0
    try:
        for batch in file.iter_batches(step, row_groups=[part.number], columns=part.names, use_threads=False):
            start, stop = max(part.start - at, 0), min(part.stop - at, batch.num_rows)
            if start < stop:
                yield _Chunk(part.path, part.prompt, part.first + at + start, batch.slice(start, stop - start))
            at += batch.num_rows
            if at >= part.stop:
                break
    except UNREADABLE as error:
        raise UnusableSourceError(
            f"{part.path} row group {part.number} cannot be read behind row {part.first + at} ({error}); expected a whole file."
            " Make it again, or take it out of `data`"
        ) from error


def _row(table: Any, index: int, path: Path, number: int, prompt: str) -> tuple[str, dict[str, Any]]:
    """Row `number` of the file, which `table` has at `index`. What is null is absent, since a column has a value for each
    row; bytes stay in the file, by reference. Raises RowError."""
    place = f"{path} row {number}"
    values = {name: table.column(name)[index].as_py() for name in table.schema.names}
    row = {name: referred(value, path, number, name) for name, value in values.items() if value is not None}
    if not has_column(row, prompt):
        raise RowError(f"{place}: no `{prompt}` (null)")
    return place, row
