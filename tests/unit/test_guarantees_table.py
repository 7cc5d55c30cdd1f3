"""Each row of docs/guarantees.md names tests that exist: one that was renamed or moved is no longer anybody's promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "guarantees.md"
_ROW = re.compile(r"^\| (\d+) \|.*$", re.MULTILINE)
_TEST = re.compile(r"`([\w/]*(?:/test_\w+\.py)?)(?:::(\w+))?`")
WITHOUT = {40}
"""Rows that say what has to exist first."""


def rows() -> dict[int, str]:
    return {int(found[1]): found[0] for found in _ROW.finditer(PAGE.read_text())}


def named(row: str) -> list[tuple[str, str]]:
    """(file, test or "") of a row; `::name` alone is of the file before it."""
    found: list[tuple[str, str]] = []
    for path, name in _TEST.findall(row):
        if path.endswith(".py") or (name and not path):
            found.append((path or found[-1][0], name))
    return found


@pytest.mark.parametrize("number", rows())
def test_a_row_names_tests_that_exist(number: int) -> None:
    tests = named(rows()[number])
    assert tests or number in WITHOUT
    for path, name in tests:
        assert (TESTS / path).is_file(), path
        assert not name or f"def {name}(" in (TESTS / path).read_text(), f"{path}::{name}"


def test_the_rows_are_in_order() -> None:
    assert list(rows()) == sorted(rows())
    assert set(range(1, 50)) <= rows().keys()
