"""Plain JSON lines, cut into segments, so that the first row comes at once and memory stays flat.

A file is cut every SEGMENT_BYTES; a segment owns the lines that start in it. Of a line only its place is held (8 bytes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from physarum.actors.source.errors import BlankRowError
from physarum.actors.source.parts import Key, OpenPart, Part
from physarum.configs.data_files import RowError, parse_row

SEGMENT_BYTES: Final = 64 << 20
_READ_BYTES: Final = 8 << 20
_NEWLINE: Final = 10


class OpenFiles:
    """Open files are kept, the oldest closed first."""

    _LIMIT: Final = 64

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def line(self, path: Path, offset: int) -> bytes:
        if path not in self._files:
            while len(self._files) >= self._LIMIT:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = path.open("rb")
        file = self._files[path]
        file.seek(offset)
        return file.readline()


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes [start, end) of one file: a shard of one part. `number`: of its first line, from 1; None where nobody counted."""

    path: Path
    start: int
    end: int
    number: int | None
    prompt: str
    files: OpenFiles

    @property
    def weight(self) -> int:
        return self.end - self.start

    def parts(self, key: Key | None) -> Iterator[Part]:
        yield self

    def open(self) -> OpenPart:
        return _Lines(self)


class _Lines:
    """The lines of a segment. Blank ones are among them."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._offsets = segment, line_offsets(segment)

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        segment, offset = self._segment, int(self._offsets[index])
        text = segment.files.line(segment.path, offset)
        number = None if segment.number is None else segment.number + index
        place = f"{segment.path} at byte {offset}" if number is None else f"{segment.path}:{number}"
        return place, parsed_line(text, segment.prompt, place)


def parsed_line(text: bytes, prompt: str, place: str) -> dict[str, Any]:
    """Raises BlankRowError or RowError naming `place`."""
    if not text.strip():
        raise BlankRowError(f"{place}: blank")
    try:
        return parse_row(text, prompt)
    except RowError as error:
        raise RowError(f"{place}: {error}") from error


def cut(
    path: Path, prompt: str, files: OpenFiles, lines: range | None = None, segment_bytes: int = SEGMENT_BYTES
) -> list[Segment]:
    """A file's segments in order, of `lines` (from 0) alone where given. Raises OSError for a file that cannot be read."""
    first, last, number = 0, path.stat().st_size, 1
    if lines is not None:
        first, last = _offsets_of(path, [lines.start, lines.stop])
        number = lines.start + 1
    starts = range(first, last, segment_bytes)
    return [
        Segment(path, start, min(start + segment_bytes, last), number if start == first else None, prompt, files)
        for start in starts
    ]


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
            found.append(_newlines(block) + position + 1)
            position += len(block)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def count_lines(path: Path, limit: int | None = None) -> int:
    """Lines of a plain file, blank ones included; at least `limit` where it has more than that."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            count += block.count(b"\n")
            last = block[-1:]
            if limit is not None and count >= limit:
                return count
    return count + (last != b"\n")


def _offsets_of(path: Path, lines: Sequence[int]) -> list[int]:
    """Where lines (from 0, ascending) begin; a line behind the last one begins at the end of the file."""
    size = path.stat().st_size
    found = [0 for line in lines if line == 0]
    seen, position = 0, 0
    with path.open("rb") as file:
        while len(found) < len(lines) and (block := file.read(_READ_BYTES)):
            newlines = _newlines(block)
            while len(found) < len(lines) and lines[len(found)] <= seen + len(newlines):
                found.append(int(newlines[lines[len(found)] - seen - 1]) + position + 1)
            seen += len(newlines)
            position += len(block)
    return found + [size] * (len(lines) - len(found))


def _newlines(block: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE).astype(np.int64)
