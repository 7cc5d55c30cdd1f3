"""JSON lines packed by gzip or zstd: read forwards only, a chunk of lines in memory at a time.

A position deep in such a file costs unpacking everything before it; rows are shuffled within chunks and with other files'.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from physarum.actors.source.errors import UnusableSourceError
from physarum.actors.source.parts import HELD_WEIGHT, Key, OpenPart, Part
from physarum.actors.source.segments import parsed_line
from physarum.configs.data_files import UNREADABLE, open_lines

CHUNK_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class PackedLines:
    """A file, or its `lines` (from 0) alone: a shard."""

    path: Path
    prompt: str
    lines: range | None = None
    chunk_bytes: int = CHUNK_BYTES

    def parts(self, key: Key | None) -> Iterator[Part]:
        """In the order of the file: whoever is further unpacks no line again."""
        first = 0 if self.lines is None else self.lines.start
        texts: list[bytes] = []
        size = 0
        for text in _read(self.path, self.lines):
            texts.append(text)
            size += len(text)
            if size >= self.chunk_bytes:
                yield _Chunk(self, first, texts, size)
                first, texts, size = first + len(texts), [], 0
        if texts:
            yield _Chunk(self, first, texts, size)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """`texts` [n] are lines first, first + 1, ... (from 0). It is its own open form."""

    shard: PackedLines
    first: int
    texts: list[bytes]
    size: int

    @property
    def weight(self) -> int:
        return HELD_WEIGHT * self.size

    def open(self) -> OpenPart:
        return self

    def __len__(self) -> int:
        return len(self.texts)

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        place = f"{self.shard.path}:{self.first + index + 1}"
        return place, parsed_line(self.texts[index], self.shard.prompt, place)


def count_packed(path: Path, limit: int | None = None) -> int:
    """Lines, blank ones included; `limit` where it has at least so many."""
    return sum(1 for _ in _read(path, None if limit is None else range(limit)))


def _read(path: Path, lines: range | None) -> Iterator[bytes]:
    """Raises UnusableSourceError: rows behind a broken place cannot be counted."""
    try:
        with open_lines(path) as file:
            yield from file if lines is None else itertools.islice(file, lines.start, lines.stop)
    except UNREADABLE as error:
        raise UnusableSourceError(
            f"{path} cannot be unpacked ({type(error).__name__}: {error}); expected a whole gzip or zstd file. Make it again,"
            " or take it out of `data`"
        ) from error
