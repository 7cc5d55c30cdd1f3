"""What a run still has of its samples: the archive, then the log, by sequence; and which ranges it has not.

1 ......... a | a+1 ....... b | b+1 ........ c
  trimmed     |   archive     |   SAMPLES
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Final

from physarum.actors.context import RunFolder
from physarum.actors.tools.archive import Archive, SegmentFile, in_segments
from physarum.actors.tools.errors import SamplesMissingError
from physarum.actors.wire import read_header
from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.errors import CodecError
from physarum.bus.log import LogEntry, LogGapError, StreamState
from physarum.bus.records import ExecutionHeader

Range = tuple[int, int]
"""Sequences [first, last], both included."""

_PIECE: Final = 256


class Recorded:
    """The recorded samples of one run. Make it by `Recorded.open`."""

    def __init__(self, bus: Bus, archive: Archive, segments: list[SegmentFile], state: StreamState) -> None:
        self._bus, self._archive, self._segments, self._state = bus, archive, segments, state

    @classmethod
    async def open(cls, bus: Bus, folder: RunFolder) -> Recorded:
        archive = Archive(folder.archive)
        # The log first: what is trimmed between the two looks is in the archive by then.
        state = await log.state(bus, "samples")
        return cls(bus, archive, await asyncio.to_thread(archive.segments), state)

    @property
    def last(self) -> int:
        """The newest sequence that was ever given; 0 for an empty log."""
        return self._state.last

    def present(self) -> list[Range]:
        """What is there, as ranges in order, joined where they touch."""
        ranges = [(segment.first, segment.last) for segment in self._segments]
        if self._state.messages:
            ranges.append((self._state.first, self._state.last))
        return _joined(ranges)

    def missing(self, first: int, last: int) -> list[Range]:
        """The parts of [first, last] that are neither archived nor in the log."""
        found: list[Range] = []
        at = first
        for start, end in self.present():
            if start > last:
                break
            if start > at:
                found.append((at, start - 1))
            at = max(at, end + 1)
        if at <= last:
            found.append((at, last))
        return found

    def require(self, first: int, last: int) -> None:
        """Raises SamplesMissingError naming every range of [first, last] that is not there."""
        gone = self.missing(first, last)
        if gone:
            raise SamplesMissingError(
                f"run {self._bus.run}: samples {_listed(gone)} of {first} to {last} are not there; there are:"
                f" {_listed(self.present()) or 'none'}, and {self.last} were recorded (the log is trimmed below the oldest kept"
                " checkpoint). Ask for those that are there, or record with `samples.keep: all`"
            )

    async def entries(self, first: int, last: int) -> AsyncIterator[LogEntry]:
        """The messages of [first, last] that are there, in order of sequence."""
        at = first
        for segment in self._segments:
            if segment.last < at or segment.first > last:
                continue
            for entry in await asyncio.to_thread(self._archive.read, segment):
                if at <= entry.sequence <= last:
                    yield entry
            at = max(at, segment.last + 1)
        for start in range(max(at, self._state.first), min(last, self._state.last) + 1, _PIECE):
            for entry in await log.get_many(
                self._bus, "samples", range(start, min(start + _PIECE, last + 1, self.last + 1))
            ):
                yield entry

    async def archived(self) -> AsyncIterator[LogEntry]:
        """Every archived message, in order of sequence, also where the log still has it."""
        for segment in self._segments:
            for entry in await asyncio.to_thread(self._archive.read, segment):
                yield entry

    async def headers(self, sequences: Iterable[int]) -> dict[int, ExecutionHeader]:
        """Headers by sequence, of those that are still there."""
        wanted = sorted(set(sequences))
        found: dict[int, ExecutionHeader] = {}
        for segment, part in self._by_segment(wanted):
            entries = (
                await self._live(part) if segment is None else await asyncio.to_thread(self._archive.read, segment)
            )
            inside = set(part)
            found |= {entry.sequence: read_header(entry.headers) for entry in entries if entry.sequence in inside}
        return found

    def _by_segment(self, sequences: list[int]) -> Iterator[tuple[SegmentFile | None, list[int]]]:
        groups: dict[SegmentFile | None, list[int]] = {}
        for sequence in sequences:
            groups.setdefault(in_segments(self._segments, sequence), []).append(sequence)
        yield from groups.items()

    async def _live(self, sequences: list[int]) -> list[LogEntry]:
        inside = [sequence for sequence in sequences if self._state.first <= sequence <= self._state.last]
        try:
            return await log.get_many(self._bus, "samples", inside)
        except LogGapError:  # trimmed while we read: what is left, one by one
            return [entry for sequence in inside if (entry := await self._one(sequence)) is not None]

    async def _one(self, sequence: int) -> LogEntry | None:
        try:
            return await log.get(self._bus, "samples", sequence)
        except LogGapError:
            return None


def readable_header(entry: LogEntry) -> ExecutionHeader | None:
    """The entry's header; None where it is none of ours."""
    try:
        return read_header(entry.headers)
    except CodecError:
        return None


def _joined(ranges: list[Range]) -> list[Range]:
    joined: list[Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def _listed(ranges: list[Range]) -> str:
    return ", ".join(f"{first} to {last}" for first, last in ranges)
