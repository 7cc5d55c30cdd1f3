"""Memory of an older version that is filled again: chunks that it still has are verified there, all others are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.chunk_threads import ChunkQueue, ChunkThread, FillWork
from physarum.weightsync.digest import digest_of
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.mappings import memory_of
from physarum.weightsync.pace import Pace

SIZE = 4096
CHUNKS = [bytes([number]) * SIZE for number in range(4)]


@dataclass
class Counted(Filling):
    """Remembers where it was written."""

    path: Path | None
    descriptor: int
    written: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        Filling.__init__(self, self.path, self.descriptor)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        self.written.append(offset)
        super().write(data, offset)


class Base(HeldFile):
    """The version before: the four chunks one after another."""

    def __init__(self) -> None:
        self._bytes = memoryview(b"".join(CHUNKS))

    def slice(self, start: int, size: int) -> memoryview:
        return self._bytes[start : start + size]


@pytest.fixture
def spare(tmp_path: Path) -> Iterator[Path]:
    """Holds the chunks 0, 1 and 3 where they belong; where chunk 2 belongs one byte is another."""
    altered = bytearray(CHUNKS[2])
    altered[7] ^= 1
    area = SharedArea(tmp_path)
    path = tmp_path / "spare" / "old"
    path.write_bytes(CHUNKS[0] + CHUNKS[1] + altered + CHUNKS[3])
    yield path
    del area


def filled(filling: Counted) -> bytes:
    digests = [digest_of(chunk) for chunk in CHUNKS]
    memory = memoryview(memory_of(filling.descriptor, writable=True))
    known = {digest: (SIZE * place, SIZE) for place, digest in enumerate(digests)}
    places = {digest: [start] for digest, (start, _) in known.items()}
    work = FillWork(filling, memory, places, Base(), known, {}, lambda digest, came_as: None)
    thread = ChunkThread(work, [], Pace())
    thread.run(ChunkQueue(dict.fromkeys(digests, SIZE)))
    assert (thread.reused, thread.fetched) == (4 * SIZE, 0)
    return bytes(memory[: 4 * SIZE])


def opened(area: SharedArea) -> Counted:
    made = area.begin("fetch-x")
    filling = Counted(made.path, made.descriptor)
    filling.reserve(4 * SIZE)
    return filling


def test_only_what_the_spare_has_not_is_written(tmp_path: Path, spare: Path) -> None:
    filling = opened(SharedArea(tmp_path))
    assert not spare.exists(), "it is filled again"
    assert filled(filling) == b"".join(CHUNKS)
    assert filling.written == [2 * SIZE]


def test_memory_that_held_nothing_is_written_as_a_whole(tmp_path: Path) -> None:
    filling = opened(SharedArea(tmp_path))
    assert filled(filling) == b"".join(CHUNKS)
    assert sorted(filling.written) == [0, SIZE, 2 * SIZE, 3 * SIZE]
