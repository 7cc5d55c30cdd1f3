"""Images of a Parquet file stay in it: tasks hold references, which are read where they are used."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from physarum.actors.source import parquet as parquet_rows
from physarum.actors.source.file_rows import FileRows
from physarum.agents.attachments import is_reference, load
from physarum.agents.errors import TaskError
from physarum.bus.codec import pack, unpack
from physarum.configs.rows import ColumnsConfig


@pytest.mark.parametrize("chunk_rows", [2, 1 << 16])
def test_bytes_travel_by_reference_and_come_back_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setattr(parquet_rows.ParquetRows.__init__, "__defaults__", (None, 1 << 20, chunk_rows))
    images = [[{"bytes": bytes([row, shot]) * 9, "path": f"{row}.png"} for shot in range(2)] for row in range(11)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"prompt": list(range(11)), "image": images}), path, row_group_size=4)
    rows = FileRows((Path(f"{path}[3:]"),), ColumnsConfig(images="image"), 0, shuffle=True)
    for index in range(8):
        row = unpack(pack(rows.row(0, index)))
        number, attached = row["prompt"], row["metadata"]["images"]
        assert [one["path"] for one in attached] == [f"{number}.png"] * 2
        assert all(is_reference(one["bytes"]) for one in attached)
        assert [load(one["bytes"]) for one in attached] == [one["bytes"] for one in images[number]]


def test_an_attachment_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"image": [b"x", None]}), path)
    reference = {"parquet": str(path), "row": 0, "column": "image", "at": []}
    assert load(reference) == b"x"
    for change, reason in (
        ({"row": 1}, "NoneType stands there"),
        ({"row": 2}, "the file has fewer rows"),
        ({"column": "images"}, "KeyError"),
        ({"parquet": str(tmp_path / "b.parquet")}, "FileNotFoundError"),
    ):
        with pytest.raises(TaskError, match=rf"cannot be read \(.*{reason}"):
            load({**reference, **change})
