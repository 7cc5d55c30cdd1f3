"""Packed and Parquet files and slices: each row once an epoch, any position the same row again, faults by file and row."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from physarum.actors.source import file_rows, packed
from physarum.actors.source import parquet as parquet_rows
from physarum.actors.source.cursor import RowCursor
from physarum.actors.source.errors import EpochEndError, UnusableSourceError
from physarum.actors.source.file_rows import FileRows
from physarum.actors.source.rows import RowStream
from physarum.configs.checks.data import check_data
from physarum.configs.data_files import RowError, expand_data
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.rows import ColumnsConfig

KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")


def write(path: Path, prompts: list[Any], group: int = 7, **columns: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"prompt": prompts, **columns}), path, row_group_size=group)
        return path
    rows = [
        {"prompt": prompt, **{name: column[at] for name, column in columns.items()}}
        for at, prompt in enumerate(prompts)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text))
    return path


def opened(*data: Path | str, shuffle: bool = True, columns: dict[str, str] | None = None, **sizes: int) -> FileRows:
    return FileRows(tuple(map(Path, data)), ColumnsConfig(**(columns or {})), 7, shuffle=shuffle, **sizes)


def epoch_of(rows: RowStream, epoch: int = 0) -> list[Any]:
    found: list[Any] = []
    while True:
        try:
            found.append(rows.row(epoch, len(found))["prompt"])
        except EpochEndError:
            return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few rows go the ways that large ones go."""
    monkeypatch.setattr(packed.PackedLines.__init__, "__defaults__", (None, 60))
    monkeypatch.setattr(parquet_rows.ParquetRows.__init__, "__defaults__", (None, 1 << 20, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("window", [1, 200, 1 << 20])
def test_each_row_comes_once_an_epoch_and_any_position_can_be_asked_for(
    tmp_path: Path, kind: str, shuffle: bool, window: int, small_chunks: None
) -> None:
    names = [f"{file}/{row}" for file in "abc" for row in range(20)]
    for number, file in enumerate("abc"):
        write(tmp_path / f"{file}.{kind}", names[20 * number : 20 * number + 20])
    whole = epoch_of(opened(tmp_path, shuffle=shuffle, window_bytes=window), 2)
    assert sorted(whole) == sorted(names)
    assert (whole == names) is not shuffle
    for index in (59, 0, 31):
        assert opened(tmp_path, shuffle=shuffle, window_bytes=window).row(2, index)["prompt"] == whole[index]
    rows = opened(tmp_path, shuffle=shuffle, window_bytes=window)
    assert [rows.row(2, index)["prompt"] for index in (59, 3, 58)] == [whole[index] for index in (59, 3, 58)]
    if shuffle:
        assert epoch_of(rows, 3) != whole


def test_a_folder_of_every_kind_of_file_is_one_source(tmp_path: Path) -> None:
    names = [write(tmp_path / f"sub/f.{kind}", [f"{kind}/{row}" for row in range(9)]) for kind in KINDS]
    assert sorted(expand_data([tmp_path])) == sorted(names)
    found = epoch_of(opened(tmp_path))
    assert sorted(found) == sorted(f"{kind}/{row}" for kind in KINDS for row in range(9))
    assert len({prompt.split("/")[0] for prompt in found[:12]}) > 1, "small files are shuffled together"


# Three files of 4, 0 and 5 rows, however they are packed.
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(-11, 11) | st.none(), st.integers(-11, 11) | st.none(), st.booleans())
def test_a_slice_means_what_it_means_in_python(kind: str, start: int | None, stop: int | None, at: bool) -> None:
    entry = f"*.{kind}{'@' if at else ''}[{'' if start is None else start}:{'' if stop is None else stop}]"
    with tempfile.TemporaryDirectory() as folder:
        for name, prompts in (("a", [0, 1, 2, 3]), ("b", list[int]()), ("c", [4, 5, 6, 7, 8])):
            write(Path(folder, f"{name}.{kind}"), prompts, group=2)
        expected = list(range(9))[start:stop]
        if expected:
            assert epoch_of(opened(Path(folder, entry), shuffle=False)) == expected
            assert sorted(epoch_of(opened(Path(folder, entry)), 3)) == expected
        else:
            with pytest.raises((UnusableSourceError, ValueError), match=r"holds no row"):
                opened(Path(folder, entry))


def test_lines_of_a_slice_are_named_by_their_numbers_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": 0}\n{"prompt": 1}\nbroken\n{"prompt": 3}')
    rows = opened(f"{path}[1:]", shuffle=False)
    with pytest.raises(RowError, match=r"a\.jsonl:3: not JSON"):
        rows.row(0, 1)
    assert rows.row(0, 2) == {"prompt": 3}


@pytest.mark.parametrize("rows", ["[2:2]", "[5:2]", "@[3]", "[1:2:3]", "[a:b]", "[-:2]", "@[1:2"])
def test_broken_slices_are_refused_with_what_is_expected(recipe: Path, rows: str) -> None:
    recipe.write_text(recipe.read_text().replace("DATA", json.dumps(f"a.jsonl{rows}")))
    with pytest.raises(ConfigError, match=r"a path and a slice of its rows such as `train\.jsonl\[100:2000\]`"):
        resolve(recipe)


def test_brackets_of_a_pattern_stay_a_pattern(tmp_path: Path) -> None:
    write(tmp_path / "part-1", [1])
    write(tmp_path / "part-2", [2])
    assert epoch_of(opened(tmp_path / "part-[12]", shuffle=False)) == [1, 2]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run: {name: r}\nmodel: {path: m}\nsource: {data: DATA}\ntrainer: {objective: sft, lr: 1.0}\nstop: {steps: 1}\n"
    )
    return path


def problems(recipe: Path, data: str) -> list[str]:
    recipe.write_text(recipe.read_text().replace("DATA", json.dumps(data)))
    return [f"{one.found}; {one.expected}" for one in check_data(resolve(recipe))]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_file_that_is_cut_off_is_named_before_the_start_and_at_it(tmp_path: Path, recipe: Path, kind: str) -> None:
    path = write(tmp_path / f"a.{kind}", [f"{number}" * 50 for number in range(900)])
    path.write_bytes(path.read_bytes()[:-40])
    (found,) = problems(recipe, path.name)
    assert f"a.{kind}, which cannot be read" in found
    with pytest.raises(UnusableSourceError, match=rf"a\.{kind} cannot be (unpacked|read)"):
        epoch_of(opened(path))


def test_parquet_without_the_column_or_with_nulls_is_named(tmp_path: Path, recipe: Path) -> None:
    write(tmp_path / "a.parquet", ["x", None, "z"], question=["q", "r", None])
    (found,) = problems(recipe, "a.parquet")
    assert "1 broken rows in" in found
    assert found.endswith("a.parquet (row 1: no `prompt` (null)); rows with a prompt")
    rows = opened(tmp_path / "a.parquet", shuffle=False)
    assert rows.row(0, 0) == {"prompt": "x"}
    with pytest.raises(RowError, match=r"a\.parquet row 1: no `prompt` \(null\)"):
        rows.row(0, 1)
    with pytest.raises(UnusableSourceError, match=r"has no column `q`; found prompt, question"):
        opened(tmp_path / "a.parquet", columns={"prompt": "q"}).row(0, 0)


def test_nested_columns_tools_and_attachments_reach_the_task(tmp_path: Path) -> None:
    """As verl writes them: messages, the label in a mapping; tools as JSON text, images as they are."""
    messages = [[{"role": "user", "content": "q"}], [{"role": "user", "content": "r"}]]
    tools = [json.dumps([{"name": "f"}]), "{"]
    path = write(
        tmp_path / "a.parquet", messages, reward_model=[{"ground_truth": "1"}, {"ground_truth": None}], tools=tools,
        image=[["a.png"], None], extra_info=[{"split": "train"}, {"split": "test"}],
    )  # fmt: skip
    names = {"label": "reward_model.ground_truth", "images": "image", "metadata": "extra_info"}
    rows = opened(path, shuffle=False, columns=names)
    assert rows.row(0, 0) == {
        "prompt": messages[0], "label": "1", "metadata": {"split": "train", "tools": [{"name": "f"}], "images": ["a.png"]},
    }  # fmt: skip
    with pytest.raises(RowError, match=r"a\.parquet row 1: `tools` is no JSON"):
        rows.row(0, 1)


def test_a_cursor_goes_on_anywhere_in_parquet_as_if_it_had_never_stopped(tmp_path: Path, small_chunks: None) -> None:
    write(tmp_path / "a.parquet", [number if number % 5 else None for number in range(40)])
    whole = [picked.row["prompt"] for picked in taken(RowCursor(opened(tmp_path), 0, 0, 2))]
    assert sorted(whole) == sorted(2 * [number for number in range(40) if number % 5])
    for stop in (1, 17, 32, 50):
        first = RowCursor(opened(tmp_path), 0, 0, 2)
        head = [picked.row["prompt"] for _, picked in zip(range(stop), taken(first), strict=False)]
        rest = RowCursor(opened(tmp_path), first.epoch, first.index, 2)
        assert head + [picked.row["prompt"] for picked in taken(rest)] == whole


def taken(cursor: RowCursor) -> Iterator[Any]:
    while (picked := cursor.take()) is not None:
        yield picked


def test_a_large_row_group_is_never_in_memory_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB in one row group, chunks of 1 MB: Arrow holds a few of them at most."""
    text = [f"{number:08d}" * 128 for number in range(40_000)]
    path = write(tmp_path / "a.parquet", text, group=40_000)
    monkeypatch.setattr(parquet_rows.ParquetRows.__init__, "__defaults__", (None, 1 << 20, 1 << 16))
    rows = opened(path, window_bytes=8 << 20)
    before, most = pa.total_allocated_bytes(), 0
    del text
    for index in (*range(0, 40_000, 500), 5, 39_999):
        rows.row(0, index)
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 12 << 20


def test_only_the_row_groups_of_a_window_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write(tmp_path / f"{number}.parquet", [f"{number}/{row}" for row in range(50)], group=10)
    read: list[Path] = []
    opening = parquet_rows._opened
    monkeypatch.setattr(parquet_rows, "_opened", lambda path: read.append(path) or opening(path))
    opened(tmp_path, window_bytes=1000).row(0, 0)
    assert 1 <= len(set(read)) <= 4
    assert file_rows.WINDOW_BYTES > 1000
