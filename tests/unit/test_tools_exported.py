"""Exported samples come back as they were; what is no execution is named by its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from physarum.actors.tools.errors import ArchiveAlteredError, BadLinesError
from physarum.actors.tools.exported import BadLine, Head, Row, Writer, read_head, read_rows, refuse_bad
from physarum.bus.codec import encode
from physarum.bus.records import Event, Execution, Sample, Task
from physarum.bus.version import Span

HEAD = Head(run="old", first=1, last=2, config="run: {name: old}\n", forks=[(1, 0), (2, 5)])


def execution(member: int) -> Execution:
    """Two samples of several turns: environment tokens without log-probability, arrays in free fields."""
    task = Task(
        id=f"main/0/0/{member}", run="old", source="main", ordinal=member, group="main/0/0", group_size=2, member=member,
        prompt={"text": "1+1", "ids": [1, 2]}, label=2, metadata={"level": 3},
    )  # fmt: skip
    samples = [
        Sample(
            token_ids=np.array([7, 8, 9, 10 + number], np.int32),
            prompt_len=1,
            loss_mask=np.array([True, False, True]),
            logprobs=np.array([-0.1, np.nan, -1e-7], np.float32),
            spans=[Span("policy@1.0", 0, 2), Span("policy@1.1", 2, 3)],
            reward=0.1 * number,
            reward_parts={"exact": 1.0},
            outputs={"values": np.array([1.5, np.nan], np.float32), "turns": [1, 2]},
            events=[Event("tool", 1.0, 2.5)],
        )
        for number in range(2)
    ]
    return Execution(id=f"x{member}", task=task, samples=samples, worker="rollout-0", started_at=1.25, finished_at=2.5)


def write(path: Path) -> None:
    with Writer(path, HEAD) as writer:
        for member in range(2):
            writer.add(Row(sequence=member + 1, execution=execution(member)))


@pytest.mark.parametrize("form", ["msgpack", "jsonl"])
def test_an_export_gives_back_every_bit(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"samples.{form}"
    write(path)
    assert read_head(path) == HEAD
    rows = list(read_rows(path))
    assert [row.sequence for row in rows if isinstance(row, Row)] == [1, 2]
    assert [encode(row.execution) for row in rows if isinstance(row, Row)] == [
        encode(execution(0)),
        encode(execution(1)),
    ]


def test_lines_that_are_no_executions_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    write(path)
    head, first, second = path.read_text().splitlines()
    short = second.replace('"prompt_len":1', '"prompt_len":9')
    path.write_text("\n".join([head, "{not json", first, '{"sequence": 3}', short]))
    rows = list(read_rows(path))
    bad = [row for row in rows if isinstance(row, BadLine)]
    assert [row.number for row in bad] == [2, 4, 5]
    assert len(rows) - len(bad) == 1
    with pytest.raises(BadLinesError, match=r"(?s)3 lines .* line 2: .* line 5: prompt_len is 9 of 4"):
        refuse_bad(path, bad)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.msgpack"
    write(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArchiveAlteredError, match="truncated"):
        list(read_rows(path))


def test_what_is_no_export_is_refused_by_its_head(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"prompt": "1+1"}\n')
    with pytest.raises(ArchiveAlteredError, match="does not begin with the head"):
        read_head(path)
    with pytest.raises(BadLinesError, match="expected .jsonl or .msgpack"):
        read_head(tmp_path / "other.parquet")


def test_an_export_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    broken = execution(0)
    broken.samples[0].outputs["value"] = np.array([np.inf], np.float32)
    with pytest.raises(TypeError, match="no JSON form"), Writer(path, HEAD) as writer:
        writer.add(Row(sequence=1, execution=broken))
    assert list(tmp_path.iterdir()) == []
