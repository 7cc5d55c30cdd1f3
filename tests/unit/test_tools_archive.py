"""Archive segments: whole, verified, and let go by sequence; missing ranges are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors.tools.archive import Archive
from physarum.actors.tools.errors import ArchiveAlteredError, SamplesMissingError
from physarum.actors.tools.recorded import Recorded
from physarum.bus.log import LogEntry, StreamState


def entries(first: int, last: int) -> list[LogEntry]:
    return [LogEntry(n, "ph.r.samples.train.t", {"Ph-Run": "r"}, b"%d" % n) for n in range(first, last + 1)]


def filled(folder: Path, *ranges: tuple[int, int]) -> Archive:
    archive = Archive(folder)
    for first, last in ranges:
        archive.write("r", "then", entries(first, last))
    return archive


def test_a_segment_gives_back_its_messages(tmp_path: Path) -> None:
    archive = filled(tmp_path / "a", (1, 3), (4, 4))
    assert [archive.read(segment) for segment in archive.segments()] == [entries(1, 3), entries(4, 4)]
    assert archive.through == 4


def test_an_altered_or_truncated_segment_is_refused_by_name(tmp_path: Path) -> None:
    archive = filled(tmp_path, (1, 3))
    [segment] = archive.segments()
    whole = segment.path.read_bytes()
    for damaged in (whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b""):
        segment.path.write_bytes(damaged)
        with pytest.raises(ArchiveAlteredError, match="000000000001-000000000003"):
            archive.read(segment)


def test_only_segments_wholly_below_are_let_go(tmp_path: Path) -> None:
    archive = filled(tmp_path, (1, 3), (4, 6), (7, 9))
    assert archive.drop_below(7) == 2
    assert [(segment.first, segment.last) for segment in archive.segments()] == [(7, 9)]


def test_a_full_disk_leaves_no_half_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("physarum.actors.tools.archive.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        filled(tmp_path, (1, 3))
    assert list(tmp_path.iterdir()) == []


def test_missing_ranges_are_named(tmp_path: Path) -> None:
    archive = filled(tmp_path, (4, 6), (7, 9))
    state = StreamState(first=15, last=20, messages=6, bytes=0, created="then", limit_bytes=-1)
    recorded = Recorded(_NoBus(), archive, archive.segments(), state)  # type: ignore[arg-type]
    assert recorded.present() == [(4, 9), (15, 20)]
    assert recorded.missing(1, 22) == [(1, 3), (10, 14), (21, 22)]
    assert recorded.missing(5, 8) == []
    with pytest.raises(SamplesMissingError, match="samples 1 to 3, 10 to 14 of 1 to 20 .* there are: 4 to 9, 15 to 20"):
        recorded.require(1, 20)


class _NoBus:
    run = "r"
