"""Data files exist and can be read; broken lines are counted and named before they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from physarum.configs.data_entries import kind_of
from physarum.configs.data_files import UNREADABLE, FileReport, RowError, expand_data, inspect_file, unmatched
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
    for path in expand_data(data)[:_MAX_FILES]:
        try:
            reports.append(inspect_file(path, columns.prompt, _MAX_LINES))
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


def _broken_lines(where: str, report: FileReport) -> Problem:
    unit = "row" if kind_of(report.path) == "parquet" else "line"
    tried = "" if report.complete else f" of the first {_MAX_LINES}"
    named = "; ".join(f"{unit} {number}: {reason}" for number, reason in report.named)
    more = f"; and {report.broken - len(report.named)} more" if report.broken > len(report.named) else ""
    found = f"{report.broken} broken {unit}s{tried} in {display_path(report.path)} ({named}{more})"
    expected = "JSON objects" if unit == "line" else "rows with a prompt"
    return Problem(Severity.WARNING, where, found, expected, f"correct these {unit}s: they are skipped and counted")
