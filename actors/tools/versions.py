"""`ledger --version V`: which steps and samples a version took part in, and which step made it."""

from __future__ import annotations

import msgspec

from physarum.actors.account import Settled
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.book import Book
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.recorded import Recorded, readable_header
from physarum.actors.tools.steps import tokens_by_version, trained_by_version
from physarum.bus import ledger
from physarum.bus.errors import RecordError
from physarum.bus.records import ExecutionHeader
from physarum.bus.version import Version, effective_number


class VersionStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that trained tokens of the version.

    `source` headers: counted in the samples themselves; ages: these samples are trimmed, and the step's own count by age
    says how many of its tokens were of this number (of any epoch with this effective number).
    """

    number: int
    epoch: int
    plan: int
    age: int
    tokens: int
    executions: int | None
    source: str


class VersionSample(msgspec.Struct, frozen=True, kw_only=True):
    """An execution that the version made tokens of, as far as it is still in the log or the archive."""

    task: str
    execution: str
    sequence: int
    tokens: int
    step: int | None
    """The number of the step that trained it; null when none has."""


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """`made_by`: the plan of the step that made these weights; null for the weights that an epoch began with."""

    version: str
    effective: int
    """Its number in the surviving history: smaller than its own when a takeover resumed before it."""
    made_by: int | None
    withdrawn: bool
    """A takeover made the step that made it void."""
    steps: list[VersionStep]
    samples: list[VersionSample]
    trimmed_through: int
    """Samples up to this sequence are gone, so `samples` does not list them; 0 when all are there."""


async def version_view(run: OpenRun, label: str) -> VersionView:
    """Raises NotInRunError for what is no version of the run."""
    version = _parsed(label, run.name)
    book = Book(await ledger.read(run.bus, key=run.ledger))
    recorded = await Recorded.open(run.bus, run.folder)
    gone = recorded.missing(1, recorded.last)
    headers: dict[int, ExecutionHeader] = {}
    async for entry in recorded.entries(1, recorded.last):
        header = readable_header(entry)
        if header is not None and any(span.version == label for sample in header.samples for span in sample.spans):
            headers[entry.sequence] = header
    view = build(book, version, headers, gone[-1][1] if gone else 0)
    if not view.steps and not view.samples and view.made_by is None and not _began(book, version):
        raise NotInRunError(f"run {run.name} has no version {label}: no step made it and no sample names it")
    return view


def build(book: Book, version: Version, headers: dict[int, ExecutionHeader], trimmed_through: int) -> VersionView:
    """Pure: from the ledger and the headers that name the version."""
    label = str(version)
    made = [one for one in book.steps if one.step.changed and (one.step.epoch, one.step.number) == version_key(version)]
    steps = [_part(book, label, done, headers, trimmed_through) for done in book.settled]
    step_of = {one.sequence: step.number for step, plan in book.settled for one in plan.executions}
    samples = [
        VersionSample(
            task=header.task,
            execution=header.execution,
            sequence=sequence,
            tokens=tokens_by_version(header).get(label, 0),
            step=step_of.get(sequence),
        )
        for sequence, header in sorted(headers.items())
    ]
    return VersionView(
        version=label,
        effective=effective_number(version, book.forks),
        made_by=made[-1].step.plan if made else None,
        withdrawn=bool(made) and all(one.void for one in made),
        steps=[step for step in steps if step is not None],
        samples=samples,
        trimmed_through=trimmed_through,
    )


def _part(
    book: Book, label: str, done: Settled, headers: dict[int, ExecutionHeader], trimmed_through: int
) -> VersionStep | None:
    """What the version contributed to one step; None for nothing."""
    step, plan = done
    age = book.age(label, plan.at_number)
    trimmed = any(one.sequence <= trimmed_through for one in plan.executions)
    counts = [
        trained_by_version(headers[one.sequence], one.masks).get(label, 0)
        for one in plan.executions
        if one.sequence in headers and not step.refused
    ]
    tokens = step.ages.get(age, 0) if trimmed else sum(counts)
    if tokens == 0:
        return None
    return VersionStep(
        number=step.number,
        epoch=step.epoch,
        plan=step.plan,
        age=age,
        tokens=tokens,
        executions=None if trimmed else sum(count > 0 for count in counts),
        source="ages" if trimmed else "headers",
    )


def version_key(version: Version) -> tuple[int, int]:
    return version.epoch, version.number


def _began(book: Book, version: Version) -> bool:
    """Whether an epoch began with these weights."""
    return any((fork.epoch, fork.number) == version_key(version) for fork in book.forks)


def _parsed(label: str, run: str) -> Version:
    try:
        return Version.parse(label)
    except RecordError as error:
        raise NotInRunError(f"run {run} has no version {label!r}: {error}") from error
