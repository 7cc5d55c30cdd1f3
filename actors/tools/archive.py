"""Samples that were trimmed from the log and kept: segments of consecutive sequences, in `runs/NAME/archive/`.

    <first>-<last>.samples     PHA1 | xxh3-128 of the rest, 16 bytes | MessagePack of the segment

Invariant: a segment is whole or absent (written aside, fsynced, renamed) *before* its messages leave the log, and it is
verified whenever it is read. Bodies that travel by reference stay in the blob store; the segment holds the reference.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from physarum.actors.tools.errors import ArchiveAlteredError
from physarum.bus import log
from physarum.bus.blobs import fsync_folder
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.errors import CodecError
from physarum.bus.log import LogEntry

_MAGIC: Final = b"PHA1"
_DIGEST_BYTES: Final = 16
_NAME: Final = re.compile(r"(\d{12})-(\d{12})\.samples")
_PIECE: Final = 256
"""Messages that are read, and written as one segment, at once: memory stays bounded by so many inline bodies."""


class SegmentFile(NamedTuple):
    """Sequences [first, last] of SAMPLES, both included."""

    first: int
    last: int
    path: Path


class Archived(msgspec.Struct, frozen=True, array_like=True):
    """One message as the log had it."""

    sequence: int
    subject: str
    headers: dict[str, str]
    data: bytes


class Segment(msgspec.Struct, frozen=True):
    """`incarnation`: the creation time of the stream whose sequences these are."""

    run: str
    incarnation: str
    entries: list[Archived]


class Archive:
    """The archive of one run. All methods block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def segments(self) -> list[SegmentFile]:
        """In order of sequence."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(SegmentFile(int(match[1]), int(match[2]), path) for match, path in named if match is not None)

    @property
    def through(self) -> int:
        """The last sequence that is archived; 0 when none is."""
        return max((segment.last for segment in self.segments()), default=0)

    def write(self, run: str, incarnation: str, entries: list[LogEntry]) -> SegmentFile:
        """Makes one segment durable. Raises OSError when the disk is full; nothing is left behind then."""
        rows = [Archived(entry.sequence, entry.subject, entry.headers, entry.data) for entry in entries]
        body = encode(Segment(run, incarnation, rows))
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"{rows[0].sequence:012d}-{rows[-1].sequence:012d}.samples"
        aside = target.with_suffix(".writing")
        try:
            with aside.open("wb") as file:
                file.write(_MAGIC + xxhash.xxh3_128_digest(body) + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        fsync_folder(self.folder)
        return SegmentFile(rows[0].sequence, rows[-1].sequence, target)

    def read(self, segment: SegmentFile) -> list[LogEntry]:
        """The messages of one segment. Raises ArchiveAlteredError."""
        data = segment.path.read_bytes()
        head = len(_MAGIC) + _DIGEST_BYTES
        if data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_128_digest(data[head:]) != data[len(_MAGIC) : head]:
            raise ArchiveAlteredError(
                f"archive segment {segment.path} is truncated or altered (its digest differs); restore it from a copy, or"
                f" remove it and do without samples {segment.first} to {segment.last}"
            )
        try:
            rows = decode(data[head:], Segment).entries
        except CodecError as error:
            raise ArchiveAlteredError(f"archive segment {segment.path} is of another format: {error}") from error
        return [LogEntry(row.sequence, row.subject, row.headers, row.data) for row in rows]

    def drop_below(self, sequence: int) -> int:
        """Removes the segments that lie wholly below `sequence`; how many."""
        old = [segment for segment in self.segments() if segment.last < sequence]
        for segment in old:
            segment.path.unlink(missing_ok=True)
        return len(old)


async def archive_below(bus: Bus, archive: Archive, floor: int) -> None:
    """Archives every sample that is in the log below sequence `floor` and not archived yet."""
    state = await log.state(bus, "samples")
    start = max(state.first, 1 + await asyncio.to_thread(lambda: archive.through))
    for first in range(start, min(floor, state.last + 1), _PIECE):
        entries = await log.get_many(bus, "samples", range(first, min(first + _PIECE, floor, state.last + 1)))
        await asyncio.to_thread(archive.write, bus.run, state.created, entries)


def in_segments(segments: Iterable[SegmentFile], sequence: int) -> SegmentFile | None:
    """The segment that holds `sequence`."""
    return next((segment for segment in segments if segment.first <= sequence <= segment.last), None)
