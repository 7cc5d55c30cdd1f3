"""Data files cut into windows of lines, so that the first row comes at once and memory stays flat.

A file is cut every SEGMENT_BYTES; a segment owns the lines that start in it. An epoch visits the segments in a seeded
order, WINDOW_BYTES of them at a time; the lines of one window are shuffled together. Data below one window, which is
most of it, is therefore shuffled as a whole; terabytes are shuffled within windows of randomly chosen segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from physarum.actors.source.permutation import Permutation

SEGMENT_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 256 << 20
_READ_BYTES: Final = 8 << 20
_NEWLINE: Final = 10


class Segment(NamedTuple):
    """Bytes [start, end) of one file."""

    path: Path
    start: int
    end: int


class Line(NamedTuple):
    """Where a line begins. `number` counts from 1; None behind the first segment of a file, where nobody counted."""

    path: Path
    offset: int
    number: int | None

    def __str__(self) -> str:
        return f"{self.path}:{self.number}" if self.number is not None else f"{self.path} at byte {self.offset}"


class Window:
    """The lines of some segments, addressed by one index. Blank lines are among them."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._offsets = [line_offsets(segment) for segment in segments]
        self._ends = np.cumsum([len(offsets) for offsets in self._offsets])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def line(self, index: int) -> Line:
        at = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[at - 1]) if at else 0
        segment, local = self._segments[at], index - before
        return Line(segment.path, int(self._offsets[at][local]), local + 1 if segment.start == 0 else None)


def cut(files: Sequence[Path], segment_bytes: int = SEGMENT_BYTES) -> list[Segment]:
    """Every file's segments, in order. Raises OSError for a file that cannot be read."""
    found: list[Segment] = []
    for path in files:
        size = path.stat().st_size
        found += [Segment(path, start, min(start + segment_bytes, size)) for start in range(0, size, segment_bytes)]
    return found


def windows(
    segments: Sequence[Segment], order: Permutation | None, window_bytes: int = WINDOW_BYTES
) -> Iterator[list[Segment]]:
    """Groups of segments of about `window_bytes`, in the permuted order (as written without one)."""
    group: list[Segment] = []
    size = 0
    for index in range(len(segments)):
        segment = segments[order(index) if order is not None else index]
        if group and size + segment.end - segment.start > window_bytes:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.end - segment.start
    if group:
        yield group


def line_offsets(segment: Segment) -> npt.NDArray[np.int64]:
    """Offsets of the lines that start in the segment, ascending int64 [n]."""
    found: list[npt.NDArray[np.int64]] = []
    with segment.path.open("rb") as file:
        # A line starts behind a newline, so the byte before the segment decides about its first byte.
        position = max(0, segment.start - 1)
        file.seek(position)
        if segment.start == 0:
            found.append(np.zeros(1, np.int64))
        while position < segment.end - 1 and (block := file.read(min(_READ_BYTES, segment.end - 1 - position))):
            newlines = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
            found.append(newlines.astype(np.int64) + position + 1)
            position += len(block)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def read_line(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.readline()
