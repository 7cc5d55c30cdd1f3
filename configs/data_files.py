"""JSONL data: which files a `data:` list names, and which of their lines cannot be used.

Invariant: a broken line is skipped, counted and named; it is never silently part of the data.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from physarum.configs.errors import PhysarumConfigError

_NAMED_LINES = 10


class RowError(PhysarumConfigError):
    """A line that cannot be a task; the message is the reason."""


@dataclass
class FileReport:
    """What the lines of a file are like: `good` and `broken` counts, the first broken ones by number and reason."""

    path: Path
    good: int = 0
    broken: int = 0
    named: list[tuple[int, str]] = field(default_factory=list)
    complete: bool = True
    """False when reading stopped at the line limit before the end of the file."""


def expand_data(data: Iterable[Path]) -> list[Path]:
    """The files that paths and glob patterns name, sorted within a pattern, each once, in the order written.

    A pattern that matches nothing adds nothing; `unmatched` names it.
    """
    return list(dict.fromkeys(file for entry in data for file in _files_of(entry)))


def unmatched(data: Iterable[Path]) -> list[Path]:
    """The entries that name no file."""
    return [entry for entry in data if not _files_of(entry)]


def _files_of(entry: Path) -> list[Path]:
    if entry.is_file():
        return [entry]
    return [file for name in sorted(glob.glob(str(entry), recursive=True)) if (file := Path(name)).is_file()]


def parse_row(line: bytes, prompt: str) -> dict[str, Any]:
    """One line as a row with the column `prompt`. Raises RowError."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RowError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise RowError("not a JSON object")
    if prompt not in row:
        raise RowError(f"no column `{prompt}`")
    return row


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def inspect_file(path: Path, prompt: str, max_lines: int) -> FileReport:
    """Tries the first `max_lines` lines; memory stays flat however large the file is."""
    report = FileReport(path)
    for number, line in numbered_lines(path):
        if report.good + report.broken == max_lines:
            report.complete = False
            break
        try:
            parse_row(line, prompt)
            report.good += 1
        except RowError as error:
            report.broken += 1
            if len(report.named) < _NAMED_LINES:
                report.named.append((number, str(error)))
    return report
