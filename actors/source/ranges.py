"""Which rows of which files an entry of `data:` means; slices are counted once, when the source opens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from physarum.actors.source.errors import UnusableSourceError
from physarum.actors.source.packed import count_packed
from physarum.actors.source.parquet import count_parquet
from physarum.actors.source.segments import count_lines
from physarum.configs.data_entries import Kind, kind_of, parse_entry
from physarum.configs.data_files import files_of

_COUNT: Final[dict[Kind, Callable[[Path, int | None], int]]] = {
    "jsonl": count_lines,
    "gzip": count_packed,
    "zstd": count_packed,
    "parquet": count_parquet,
}


class Range(NamedTuple):
    """`rows` (lines of a file of lines, blank ones included), from 0; None: all of them."""

    path: Path
    rows: range | None


def ranges(data: tuple[Path, ...]) -> list[Range]:
    """In the order written; a file that several entries name as a whole counts once.

    Raises UnusableSourceError for an entry without a file, and for a slice without a row.
    """
    found = dict.fromkeys(one for entry in data for one in _of_entry(entry))
    return list(found)


def _of_entry(entry: Path) -> list[Range]:
    path, rows = parse_entry(entry)
    files = files_of(path)
    if not files:
        raise UnusableSourceError(
            f"{path} matches no file; expected JSONL or Parquet files. Correct `data`, or create them"
        )
    return [Range(file, None) for file in files] if rows is None else _sliced(entry, files, rows)


def _sliced(entry: Path, files: list[Path], rows: slice) -> list[Range]:
    backwards = any(end is not None and end < 0 for end in (rows.start, rows.stop))
    total = sum(_COUNT[kind_of(file)](file, None) for file in files) if backwards else sys.maxsize
    start, stop, _ = rows.indices(total)
    found: list[Range] = []
    at = 0
    for file in files:
        if at >= stop:
            break
        count = _COUNT[kind_of(file)](file, None if stop == sys.maxsize else stop - at)
        first, last = max(start - at, 0), min(stop - at, count)
        if first < last:
            found.append(Range(file, range(first, last)))
        at += count
    if not found:
        raise UnusableSourceError(
            f"{entry} holds no row, of {at} in {len(files)} files; expected a slice within them. Correct it in `data`"
        )
    return found
