"""Data files: which of them a `data:` list names, and what their rows are like.

Invariant: a broken row is skipped, counted and named; it is never silently part of the data.
"""

from __future__ import annotations

import codecs
import glob
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import orjson

from physarum.configs import exact_json
from physarum.configs.data_entries import FOLDER_PATTERNS, kind_of, parse_entry
from physarum.configs.errors import PhysarumConfigError

_NAMED_LINES = 10
_READ_BYTES: Final = 1 << 20
UNREADABLE: Final = (OSError, ValueError)
"""What reading a file may raise that is cut off, packed wrongly or no Parquet file (pyarrow's own errors are ValueErrors)."""


class RowError(PhysarumConfigError):
    """A row that cannot be a task; the message is the reason."""


@dataclass
class FileReport:
    """What the rows of a file are like: `good` and `broken` counts, the first broken ones by number and reason; `rows`: how
    many there are (of lines, blank ones included); `unseen`: columns that were asked about and that no row has."""

    path: Path
    good: int = 0
    broken: int = 0
    named: list[tuple[int, str]] = field(default_factory=list)
    rows: int = 0
    unseen: set[str] = field(default_factory=set)
    complete: bool = True
    """False when reading stopped at the limit before the end of the file."""

    def add(self, number: int, fault: str | None) -> None:
        """Row `number` is good, or broken for a reason."""
        self.good += fault is None
        self.broken += fault is not None
        if fault is not None and len(self.named) < _NAMED_LINES:
            self.named.append((number, fault))


def expand_data(data: Iterable[Path]) -> list[Path]:
    """The files that paths, folders and patterns name, sorted within an entry, each once, in the order written.

    An entry that matches nothing adds nothing; `unmatched` names it.
    """
    return list(dict.fromkeys(file for entry in data for file in files_of(parse_entry(entry).path)))


def unmatched(data: Iterable[Path]) -> list[Path]:
    """The entries that name no file."""
    return [entry for entry in data if not files_of(parse_entry(entry).path)]


def files_of(entry: Path) -> list[Path]:
    """A file, the data files below a folder, or what a pattern matches; sorted."""
    if entry.is_file():
        return [entry]
    below = Path(glob.escape(str(entry))) / "**"
    patterns = [str(below / pattern) for pattern in FOLDER_PATTERNS] if entry.is_dir() else [str(entry)]
    names = sorted({name for pattern in patterns for name in glob.glob(pattern, recursive=True)})
    return [file for name in names if (file := Path(name)).is_file()]


def open_lines(path: Path) -> BinaryIO:
    """A file of lines, unpacked on the way."""
    kind = kind_of(path)
    if kind == "jsonl":
        return path.open("rb")
    import pyarrow  # type: ignore[import-untyped]  # it notices where a packed file is cut off; zstandard does not

    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression=kind), _READ_BYTES))


def parse_row(line: bytes, prompt: str) -> dict[str, Any]:
    """One line as a row with the column `prompt`. Raises RowError."""
    try:
        row = exact_json.loads(line.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise RowError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise RowError("not a JSON object")
    if not has_column(row, prompt):
        raise RowError(f"no column `{prompt}`; found {', '.join(row) or 'no keys'}")
    if column(row, prompt) is None:
        raise RowError(f"no `{prompt}` (null)")
    return row


_ABSENT: Final = object()


def has_column(row: dict[str, Any], name: str) -> bool:
    """Whether the row has the key, or the keys that a dotted name leads through."""
    return column(row, name, _ABSENT) is not _ABSENT


def column(row: dict[str, Any], name: str, default: Any = None) -> Any:
    """The value under a key, or under the keys that a dotted name leads through."""
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    inner = row.get(first)
    return column(inner, rest, default) if dot and isinstance(inner, dict) else default


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def inspect_file(path: Path, prompt: str, max_rows: int, others: Iterable[str] = ()) -> FileReport:
    """Tries the first `max_rows` rows; memory stays flat however large the file is. `others`: columns that some row is to have.
    Raises what UNREADABLE names."""
    report = FileReport(path, unseen=set(others))
    faults = _parquet_faults if kind_of(path) == "parquet" else _line_faults
    for number, fault in faults(path, prompt, report.unseen):
        if report.good + report.broken == max_rows:
            report.complete = False
            break
        report.add(number, fault)
        report.rows = number if kind_of(path) != "parquet" else number + 1
    return report


def _line_faults(path: Path, prompt: str, unseen: set[str]) -> Iterator[tuple[int, str | None]]:
    for number, line in numbered_lines(path):
        try:
            row = parse_row(line, prompt)
        except RowError as error:
            yield number, str(error)
            continue
        unseen -= {name for name in unseen if has_column(row, name)}
        yield number, None


def _parquet_faults(path: Path, prompt: str, unseen: set[str]) -> Iterator[tuple[int, str | None]]:
    from pyarrow import parquet  # only where there are such files

    root = prompt.partition(".")[0]
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        paths = [file.schema.column(number).path for number in range(len(file.schema))]
        unseen -= {name for name in unseen if any(path == name or path.startswith(f"{name}.") for path in paths)}
        chosen = prompt if prompt in names else root
        if chosen not in names:
            raise RowError(f"no column `{prompt}`; found {', '.join(names) or 'no column'}")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=[chosen]):
            for value in batch.column(chosen).to_pylist():
                absent = column({chosen: value}, prompt) is None
                yield number, f"no `{prompt}` (null)" if absent else None
                number += 1
