"""Data files exist and can be read, once each; broken lines are counted and named before they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from physarum.configs.data_entries import kind_of, parse_entry
from physarum.configs.data_files import (
    UNREADABLE,
    FileReport,
    RowError,
    expand_data,
    files_of,
    inspect_file,
    unmatched,
)
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath, display_path
from physarum.configs.root import RootConfig
from physarum.configs.rows import ColumnsConfig

_MAX_LINES = 20_000
"""Lines tried in each file: a check takes seconds however large the data is."""
_MAX_FILES = 64


def check_data(config: RootConfig) -> Iterator[Problem]:
    """The `data` of the source and of the evaluation."""
    columns = config.source.columns or ColumnsConfig()
    for key, part in config.source.parts():
        if part.data is not None:
            yield from _check(config, ("source", *key, "data"), part.data, part.columns or columns)
            yield from _repeated(config.origins.where(("source", *key, "data")), part.data)
    for key, part in config.evaluation.parts() if config.evaluation is not None else ():
        if part.data is not None:
            own = part.columns or config.evaluation.columns or columns  # type: ignore[union-attr]
            yield from _check(config, ("evaluation", *key, "data"), part.data, own)


def _check(config: RootConfig, key: KeyPath, data: tuple[Path, ...], columns: ColumnsConfig) -> Iterator[Problem]:
    where = config.origins.where(key)
    for entry in unmatched(data):
        found = f"no file {display_path(entry)}"
        yield Problem(Severity.ERROR, where, found, "a file, or a pattern that matches files", "correct the path")
    reports: list[FileReport] = []
    named = set(columns.model_dump(exclude_defaults=True, exclude={"prompt"}).values())
    for path in expand_data(data)[:_MAX_FILES]:
        try:
            reports.append(inspect_file(path, columns.prompt, _MAX_LINES, named))
        except RowError as error:
            remedy = "correct the files, or name the column in source.columns"
            yield Problem(
                Severity.ERROR, where, f"{display_path(path)}: {error}", f"a column `{columns.prompt}`", remedy
            )
        except UNREADABLE as error:
            reason = getattr(error, "strerror", None) or error
            found = f"{display_path(path)}, which cannot be read ({reason})"
            yield Problem(Severity.ERROR, where, found, "a readable file", "correct its permissions, or make it again")
    for report in reports:
        if report.broken:
            yield _broken_lines(where, report)
    if reports and not any(report.good for report in reports):
        found = f"no usable row in {', '.join(display_path(report.path) for report in reports)}"
        expected = f"rows with the column `{columns.prompt}`: JSON objects, one a line, or Parquet"
        yield Problem(Severity.ERROR, where, found, expected, "correct the files, or name the column in source.columns")
    elif reports:
        yield from _unseen(where, reports)
    yield from _out_of_range(where, data, {report.path: report for report in reports})


def _unseen(where: str, reports: list[FileReport]) -> Iterator[Problem]:
    """Columns that were named, and that no file has."""
    tried = (
        "no row" if all(report.complete for report in reports) else f"none of the first {_MAX_LINES} rows of any file"
    )
    for name in sorted(set.intersection(*(report.unseen for report in reports))):
        found, remedy = f"{tried} with the column `{name}`", "correct the name under `columns`, or leave it out"
        yield Problem(Severity.WARNING, where, found, "the columns that are named", remedy)


def _out_of_range(where: str, data: tuple[Path, ...], reports: dict[Path, FileReport]) -> Iterator[Problem]:
    """Slices without a row, as far as the files were read to their end."""
    for entry in data:
        path, rows = parse_entry(entry)
        own = [reports[file] for file in files_of(path) if file in reports]
        if rows is None or not own or len(own) != len(files_of(path)) or not all(one.complete for one in own):
            continue
        total = sum(one.rows for one in own)
        if not range(total)[rows]:
            found, remedy = f"{display_path(entry)}, and {total} rows there", "correct the slice"
            yield Problem(Severity.ERROR, where, found, "a slice that holds a row", remedy)


def _repeated(where: str, data: tuple[Path, ...]) -> Iterator[Problem]:
    """Rows that several entries name: each counts as often as it is named, so it is drawn more often than others."""
    seen: dict[Path, list[tuple[Path, slice | None]]] = {}
    for entry in data:
        path, rows = parse_entry(entry)
        files = files_of(path)
        if rows is not None and len(files) > 1:
            continue  # which rows of which file that is, is not known without counting
        for file in files:
            before = seen.setdefault(file.resolve(), [])
            again = (file, rows) not in before and any(_overlap(one, rows) for _, one in before)
            before.append((file, rows))
            if again:
                found = f"rows of {display_path(file)} in `{display_path(entry)}` and in an entry before it"
                remedy = "remove one of them, or give the rows a `weight` as a part of a mixture"
                yield Problem(Severity.WARNING, where, found, "each row once", remedy)
                break


def _overlap(one: slice | None, other: slice | None) -> bool:
    """Whether slices of one file may share rows; of those that count from the end little is known."""
    if one is None or other is None:
        return True
    ends = [end for part in (one, other) for end in (part.start, part.stop) if end is not None]
    if any(end < 0 for end in ends):
        return not any(a.stop is not None and a.stop == b.start for a, b in ((one, other), (other, one)))
    first, second = sorted((one, other), key=lambda part: part.start or 0)
    return first.stop is None or (second.start or 0) < first.stop


def _broken_lines(where: str, report: FileReport) -> Problem:
    unit = "row" if kind_of(report.path) == "parquet" else "line"
    tried = "" if report.complete else f" of the first {_MAX_LINES}"
    named = "; ".join(f"{unit} {number}: {reason}" for number, reason in report.named)
    more = f"; and {report.broken - len(report.named)} more" if report.broken > len(report.named) else ""
    found = f"{report.broken} broken {unit}s{tried} in {display_path(report.path)} ({named}{more})"
    expected = "JSON objects" if unit == "line" else "rows with a prompt"
    return Problem(Severity.WARNING, where, found, expected, f"correct these {unit}s: they are skipped and counted")
