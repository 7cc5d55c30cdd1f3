"""Rows of files and hooks: each once an epoch wherever files are cut, reproducible at any position, errors by name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.source.cursor import Picked, RowCursor
from physarum.actors.source.errors import BlankRowError, EpochEndError, UnusableSourceError
from physarum.actors.source.file_rows import FileRows
from physarum.actors.source.rows import HookRows, RowStream
from physarum.actors.source.segments import OpenFiles, Segment, cut, line_offsets
from physarum.actors.source.tasks import check_travels, group_tasks
from physarum.configs.data_files import RowError
from physarum.configs.hooks import Hook
from physarum.configs.rows import ColumnsConfig


def write(folder: Path, *names: str, rows: int = 10) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"prompt": f"{name}/{number}"}) + "\n" for number in range(rows)))


def file_rows(*data: Path, **options: Any) -> FileRows:
    return FileRows(data, ColumnsConfig(), 7, **{"shuffle": True, **options})


def epoch_of(rows: RowStream, epoch: int) -> list[str]:
    found: list[str] = []
    while True:
        try:
            found.append(rows.row(epoch, len(found))["prompt"])
        except EpochEndError:
            return found


@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=30),
    st.booleans(),
    st.integers(1, 40),
)
def test_every_line_begins_in_exactly_one_segment(lines: list[bytes], ends: bool, size: int) -> None:
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data")
        path.write_bytes(text)
        found = [
            int(offset) for segment in cut(path, "prompt", OpenFiles(), None, size) for offset in line_offsets(segment)
        ]
    expected = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    assert found == [offset for offset in expected if offset < len(text)]


def test_shuffled_epochs_hold_every_row_once_in_other_orders(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "sub/b.jsonl", "c.jsonl")
    rows = file_rows(tmp_path)
    first, second = epoch_of(rows, 0), epoch_of(rows, 1)
    assert len(first) == 30
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != sorted(first)
    files = [prompt.split("/")[0] for prompt in first[:10]]
    assert len(set(files)) > 1, "small files are shuffled together"


def test_without_shuffle_rows_come_as_written(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", rows=3)
    rows = file_rows(tmp_path / "b.jsonl", tmp_path / "*.jsonl", shuffle=False)
    expected = [f"{name}/{number}" for name in ("b.jsonl", "a.jsonl") for number in range(3)]
    assert epoch_of(rows, 0) == epoch_of(rows, 4) == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_windows_hold_every_row_once_and_any_position_can_be_asked_for(tmp_path: Path, shuffle: bool) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", rows=40)
    sizes = {"segment_bytes": 100, "window_bytes": 300, "shuffle": shuffle}
    whole = epoch_of(file_rows(tmp_path, **sizes), 2)
    assert sorted(whole) == sorted(f"{name}.jsonl/{number}" for name in "ab" for number in range(40))
    for index in (79, 0, 41):
        assert file_rows(tmp_path, **sizes).row(2, index)["prompt"] == whole[index]
    rows = file_rows(tmp_path, **sizes)
    assert [rows.row(2, index)["prompt"] for index in (79, 3, 78)] == [whole[index] for index in (79, 3, 78)]


def test_the_first_row_of_large_data_needs_one_window_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *(f"{number}.jsonl" for number in range(20)), rows=50)
    indexed: list[Segment] = []

    def counted(segment: Segment) -> Any:
        indexed.append(segment)
        return line_offsets(segment)

    monkeypatch.setattr("physarum.actors.source.segments.line_offsets", counted)
    file_rows(tmp_path, window_bytes=4000).row(0, 0)
    assert 1 <= len(indexed) <= 4


def test_broken_and_blank_lines_are_told_apart_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": 1}\n\n[1]\n{"prompt": 1, "metadata": "x"}\n{"prompt": 2')
    rows = file_rows(path, shuffle=False)
    assert rows.row(0, 0) == {"prompt": 1}
    with pytest.raises(BlankRowError):
        rows.row(0, 1)
    for index, reason in (
        (2, "a.jsonl:3: not a JSON object"),
        (3, "a.jsonl:4: `metadata` is str"),
        (4, "a.jsonl:5: not JSON"),
    ):
        with pytest.raises(RowError, match=reason):
            rows.row(0, index)
    with pytest.raises(EpochEndError):
        rows.row(0, 5)


def test_data_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableSourceError, match=r"\*\.json matches no file"):
        file_rows(tmp_path / "*.json")


class Letters:
    """A source hook whose row 2 raises and whose row 3 has no prompt."""

    def __init__(self, seed: int, *, size: int = 6) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        if index == 2:
            raise KeyError("c")
        return {} if index == 3 else {"prompt": "abcdef"[index]}


HOOK = Hook(f"{__file__}:Letters")


def take_all(cursor: RowCursor) -> Iterator[Picked]:
    while (picked := cursor.take()) is not None:
        yield picked


def test_a_cursor_skips_broken_rows_counts_each_and_names_each_once(caplog: pytest.LogCaptureFixture) -> None:
    cursor = RowCursor(HookRows(HOOK, 0, {}, shuffle=False), 0, 0, epochs=2)
    found = [(picked.epoch, picked.index, picked.row["prompt"]) for picked in take_all(cursor)]
    one = [(0, "a"), (1, "b"), (4, "e"), (5, "f")]
    assert found == [(epoch, index, prompt) for epoch in (0, 1) for index, prompt in one]
    assert cursor.broken == 4
    assert "row(0, 2) raised KeyError: 'c'" in caplog.text
    assert "row(0, 3): no `prompt`; found no keys" in caplog.text


def test_a_small_source_never_ends_between_epochs() -> None:
    cursor = RowCursor(HookRows(HOOK, 0, {"size": 2}, shuffle=True), 0, 0, epochs=None)
    taken = [cursor.take() for _ in range(100)]
    assert [(picked.epoch, picked.index) for picked in taken if picked] == [(n // 2, n % 2) for n in range(100)]


def test_a_hook_is_shuffled_like_data_and_resumes_anywhere() -> None:
    whole = [picked.row["prompt"] for picked in take_all(RowCursor(HookRows(HOOK, 3, {}, shuffle=True), 0, 0, 1))]
    assert sorted(whole) == ["a", "b", "e", "f"]
    cursor = RowCursor(HookRows(HOOK, 3, {}, shuffle=True), 0, 0, 1)
    first = cursor.take()
    assert first is not None
    rest = RowCursor(HookRows(HOOK, 3, {}, shuffle=True), cursor.epoch, cursor.index, 1)
    assert [first.row["prompt"], *(picked.row["prompt"] for picked in take_all(rest))] == whole


def test_an_epoch_without_a_usable_row_is_refused() -> None:
    class Empty:
        def row(self, epoch: int, index: int) -> dict[str, Any]:
            raise EpochEndError(0)

    with pytest.raises(UnusableSourceError, match="epoch 0 of 0 rows holds no usable one"):
        RowCursor(Empty(), 0, 0, None).take()


def test_tasks_of_a_row_share_everything_but_their_member() -> None:
    tasks = group_tasks(
        {"prompt": "p", "label": 1},
        run="r",
        source="s",
        place="3/9",
        first_ordinal=20,
        group_size=2,
        sampling={"top_k": 5},
    )
    assert [(task.id, task.ordinal, task.member, task.group, task.group_size) for task in tasks] == [
        ("s/3/9/0", 20, 0, "s/3/9", 2),
        ("s/3/9/1", 21, 1, "s/3/9", 2),
    ]
    with pytest.raises(RowError, match=r"s/3/9: object cannot travel"):
        check_travels(
            group_tasks(
                {"prompt": object()}, run="r", source="s", place="3/9", first_ordinal=0, group_size=1, sampling={}
            )[0],
            100,
        )
    with pytest.raises(RowError, match=r"s/3/9: \d+ bytes; expected at most 100"):
        check_travels(tasks[0], 100)
