"""Data files exist and can be read; broken lines are counted and named before they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from physarum.configs.data_files import FileReport, expand_data, inspect_file, unmatched
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
    if config.source.data is not None:
        yield from _check(config, ("source", "data"), config.source.data, columns)
    if config.evaluation is not None and config.evaluation.data is not None:
        yield from _check(config, ("evaluation", "data"), config.evaluation.data, config.evaluation.columns or columns)


def _check(config: RootConfig, key: KeyPath, data: tuple[Path, ...], columns: ColumnsConfig) -> Iterator[Problem]:
    where = config.origins.where(key)
    for entry in unmatched(data):
        found = f"no file {display_path(entry)}"
        yield Problem(Severity.ERROR, where, found, "a file, or a pattern that matches files", "correct the path")
    reports: list[FileReport] = []
    for path in expand_data(data)[:_MAX_FILES]:
        try:
            reports.append(inspect_file(path, columns.prompt, _MAX_LINES))
        except OSError as error:
            found = f"{display_path(path)}, which cannot be read ({error.strerror})"
            yield Problem(Severity.ERROR, where, found, "a readable file", "correct its permissions")
    for report in reports:
        if report.broken:
            yield _broken_lines(where, report)
    if reports and not any(report.good for report in reports):
        found = f"no usable line in {', '.join(display_path(report.path) for report in reports)}"
        expected = f"JSON objects with the column `{columns.prompt}`, one a line"
        yield Problem(Severity.ERROR, where, found, expected, "correct the files, or name the column in source.columns")


def _broken_lines(where: str, report: FileReport) -> Problem:
    tried = "" if report.complete else f" of the first {_MAX_LINES}"
    named = "; ".join(f"line {number}: {reason}" for number, reason in report.named)
    more = f"; and {report.broken - len(report.named)} more" if report.broken > len(report.named) else ""
    found = f"{report.broken} broken lines{tried} in {display_path(report.path)} ({named}{more})"
    return Problem(Severity.WARNING, where, found, "JSON objects", "correct these lines: they are skipped and counted")
