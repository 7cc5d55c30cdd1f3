"""Lines of a file are rows once, however often the file is given and however it grows; places are read as they are written."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.added_rows import with_digests
from physarum.actors.source import places

LINES = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=12)


def digests(lines: list[bytes], file: str = "f.jsonl", again: str = "") -> list[str]:
    return [digest for _, _, digest in with_digests(Path(file), enumerate(lines, 1), again)]


@given(LINES, LINES)
def test_only_what_a_file_gained_is_new(before: list[bytes], appended: list[bytes]) -> None:
    old, new = digests(before), digests(before + appended)
    assert len(set(new)) == len(new), "equal lines of one file are as many rows"
    assert new[: len(old)] == old


@given(LINES, st.randoms())
def test_lines_that_moved_are_not_new(lines: list[bytes], random: Random) -> None:
    moved = list(lines)
    random.shuffle(moved)
    assert set(digests(moved)) == set(digests([line + b" \n" for line in lines]))


def test_another_file_or_asking_again_is_new() -> None:
    assert not set(digests([b"a"])) & set(digests([b"a"], file="g.jsonl"))
    assert not set(digests([b"a"])) & set(digests([b"a"], again="x"))


@pytest.mark.parametrize(("epoch", "index", "text"), [(0, 5, "0/5"), (12, 0, "12/0"), (places.ADDED, 7, "added/7")])
def test_places_are_read_as_they_are_written(epoch: int, index: int, text: str) -> None:
    assert places.written(epoch, index) == text
    assert places.read(f"main/{text}") == (epoch, index)
