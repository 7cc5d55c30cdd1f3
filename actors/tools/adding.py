"""Rows for a run that goes on: a file's lines into ADDED, each once; and what became of those that were added."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from physarum.actors import states
from physarum.actors.added_rows import AddedRow, Priority, accept, with_digests
from physarum.actors.source.columns import task_row
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import RunUnfitError
from physarum.bus import log
from physarum.bus.codec import decode
from physarum.bus.errors import BusRefusedError, CodecError
from physarum.bus.register import Register
from physarum.configs.data_entries import kind_of
from physarum.configs.data_files import UNREADABLE, RowError, numbered_lines, parse_row
from physarum.configs.rows import ColumnsConfig

_DEADLINE_S: Final = 30.0
_NAMED: Final = 20
_SHOWN_CHARS: Final = 60


class Added(msgspec.Struct, kw_only=True):
    """What became of a file's lines. `named`: the first broken ones, `file:line: reason`."""

    accepted: int = 0
    present: int = 0
    broken: int = 0
    named: list[str] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One added row. `group` names its tasks once they are issued (`actorctl ledger RUN --sample GROUP/0`)."""

    sequence: int
    state: str
    group: str
    priority: Priority
    file: str
    line: int
    prompt: str


async def add(run: OpenRun, file: Path, priority: Priority, again: str = "") -> Added:
    """Gives the lines of a file to the run. Raises RunUnfitError, PublishTimeoutError (what was accepted before stays so)."""
    refuse_unfit(run)
    done = Added()
    columns = run.config.source.columns or ColumnsConfig()
    for number, line, digest in with_digests(file, _lines(file), again):
        try:
            row = _row(file, number, line, columns, priority)
            accepted = await accept(run.publisher, run.bus.run, digest, row, _DEADLINE_S)
        except (RowError, CodecError, BusRefusedError) as error:
            done.broken += 1
            if len(done.named) < _NAMED:
                done.named.append(f"{file}:{number}: {error}")
            continue
        done.accepted += accepted
        done.present += not accepted
    return done


def refuse_unfit(run: OpenRun) -> None:
    """Raises RunUnfitError for a run whose source will issue nothing more."""
    if run.finished:
        raise RunUnfitError(f"run {run.name} is finished: nobody issues what is added to it. Add to one that goes on")
    if run.config.samples.recorded:
        raise RunUnfitError(f"run {run.name} trains on recorded samples, it has no source. Add to one that has")


async def added(run: OpenRun) -> list[Row]:
    """Every row that was added, in the order of acceptance."""
    register: Register[states.SourcePosition] = Register(run.bus, run.publisher, "run", states.SourcePosition)
    name = run.config.source.name
    position = (await register.get(states.SOURCE_POSITION, name)).value
    through = 0 if position is None else position.added_through
    found = [(entry.sequence, decode(entry.data, AddedRow)) for entry in await log.scan(run.bus, "added")]
    return [
        Row(
            sequence=sequence,
            state="issued" if sequence <= through else "waiting",
            group=f"{name}/added/{sequence}",
            priority=row.priority,
            file=row.file,
            line=row.line,
            prompt=" ".join(str(row.prompt).split())[:_SHOWN_CHARS],
        )
        for sequence, row in found
    ]


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    if kind_of(file) == "parquet":
        raise RunUnfitError(f"{file} is no file of lines; expected JSON lines, plain or packed. Write the rows as such")
    try:
        yield from numbered_lines(file)
    except UNREADABLE as error:
        raise RunUnfitError(
            f"{file} cannot be read to its end ({error}); what stood before is added. Correct it, and add it again"
        ) from error


def _row(file: Path, number: int, line: bytes, columns: ColumnsConfig, priority: Priority) -> AddedRow:
    """Raises RowError."""
    row = task_row(parse_row(line, columns.prompt), columns, f"{file}:{number}")
    return AddedRow(**row, priority=priority, file=str(file.absolute()), line=number, at=time.time())
