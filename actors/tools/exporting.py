"""From a run's sample log and archive to one file."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.exported import Head, Row, Writer
from physarum.actors.tools.recorded import Range, Recorded
from physarum.actors.wire import decode_execution, reference
from physarum.bus import ledger
from physarum.bus.blobs import BlobRef
from physarum.bus.errors import BlobAlteredError, BlobMissingError
from physarum.bus.log import LogEntry
from physarum.bus.records import Execution
from physarum.configs.loader import dump


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was written. `missing`: ranges of sequences that are neither in the log nor archived."""

    file: str
    executions: int
    first: int
    last: int
    missing: list[Range]


async def export(run: OpenRun, path: Path, first: int | None, last: int | None) -> Export:
    """Writes the samples with sequences [first, last] (None: from the beginning, to the end).

    A range that was asked for must be there as a whole (SamplesMissingError); without one, what is missing is reported.
    Raises NotInRunError when the run has no sample.
    """
    recorded = await Recorded.open(run.bus, run.folder)
    present = recorded.present()
    if not present:
        raise NotInRunError(
            f"run {run.name} holds no sample; expected at least one: let it run, or record with samples.keep"
        )
    start, end = first or 1, recorded.last if last is None else last
    if first is not None or last is not None:
        recorded.require(start, end)
    count = 0
    with Writer(path, await head_of(run, start, end)) as writer:
        async for row in rows(run.folder, recorded, start, end):
            writer.add(row)
            count += 1
    return Export(file=str(path), executions=count, first=start, last=end, missing=recorded.missing(start, end))


async def head_of(run: OpenRun, first: int, last: int) -> Head:
    """What the samples are of."""
    forks = ledger.forks_of(await ledger.read(run.bus, key=run.ledger))
    return Head(
        run=run.name,
        first=first,
        last=last,
        config=dump(run.config),
        forks=[(fork.epoch, fork.number) for fork in forks],
    )


async def rows(folder: RunFolder, recorded: Recorded, first: int, last: int) -> AsyncIterator[Row]:
    """The executions of a range, bodies by reference included."""
    async for entry in recorded.entries(first, last):
        yield Row(sequence=entry.sequence, execution=await asyncio.to_thread(execution_of, folder, entry))


def execution_of(folder: RunFolder, entry: LogEntry) -> Execution:
    """Raises CodecError or a blob error."""
    ref = reference(entry.headers)
    return decode_execution(entry.headers, entry.data if ref is None else blob_of(folder, ref))


def blob_of(folder: RunFolder, ref: BlobRef) -> bytes:
    """From the first store of the run's folder that has it whole. Raises BlobMissingError or BlobAlteredError."""
    for store in folder.blob_stores:
        with contextlib.suppress(BlobMissingError, BlobAlteredError):
            return store.get(ref)
    return folder.blobs.get(ref)
