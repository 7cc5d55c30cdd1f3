"""From exported executions to a run's sample log: as a source of its own, whose account closes like any other's.

Every execution gets a new place in its source's order (`ordinal`, dense from 0) and, where some of a group are not in the
file, a group of the size that is there: otherwise the trainer would wait for members that never come. The first
execution of a member counts, as in the planner; a single member of a larger group has nobody to be compared with and is
left out. `task.metadata["imported"]` says where it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from physarum.actors import states
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.exported import Row
from physarum.actors.tools.new_run import context_of
from physarum.actors.wire import publish_execution
from physarum.bus.records import Execution, Sample
from physarum.bus.register import Register
from physarum.bus.version import Fork, Span, Version, effective_number

_ORIGIN = "imported"


class Fed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the executions of a file."""

    executions: int
    groups: int
    duplicates: int
    alone: int
    evaluation: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Which executions are taken: sequence -> (ordinal, size of its group)."""

    taken: dict[int, tuple[int, int]]
    fed: Fed


def choose(rows: Iterable[Row]) -> Choice:
    """Pure: decides from one pass what a second one publishes. Reads each row once and keeps none."""
    groups: dict[str, dict[int, int]] = {}
    sizes: dict[str, int] = {}
    duplicates = evaluation = 0
    for row in rows:
        task = row.execution.task
        if task.task_class == "eval":
            evaluation += 1
            continue
        members = groups.setdefault(task.group, {})
        sizes[task.group] = task.group_size
        if task.member in members:
            duplicates += 1
        else:
            members[task.member] = row.sequence
    kept = {name: members for name, members in groups.items() if len(members) > 1 or sizes[name] == 1}
    size_of = {sequence: len(members) for members in kept.values() for sequence in members.values()}
    taken = {sequence: (ordinal, size_of[sequence]) for ordinal, sequence in enumerate(sorted(size_of))}
    fed = Fed(
        executions=len(taken),
        groups=len(kept),
        duplicates=duplicates,
        alone=len(groups) - len(kept),
        evaluation=evaluation,
    )
    return Choice(taken=taken, fed=fed)


class Relabel:
    """How the versions of another run are called here.

    A run made for them goes on along their history: a token keeps its label, or gets the number that it has in the
    history that survived. In a run with a history of its own they are as old as that can say: epoch 0, number 0.
    """

    def __init__(self, forks: Sequence[tuple[int, int]], *, own_history: bool) -> None:
        self._forks = tuple(Fork(epoch, number) for epoch, number in forks)
        self._own_history = own_history

    def sample(self, sample: Sample) -> Sample:
        spans = [Span(self.label(span.version), span.start, span.end) for span in sample.spans]
        return msgspec.structs.replace(sample, spans=spans)

    def label(self, label: str) -> str:
        version = Version.parse(label)
        if self._own_history:
            return str(Version(version.model, 0, 0))
        return str(Version(version.model, version.epoch, effective_number(version, self._forks)))


def adapted(
    row: Row, run: str, source: str, place: tuple[int, int], relabel: Relabel, parent: str, rename: bool
) -> Execution:
    """The execution as it is stored here; `rename`: under names of this source, since the run may know its own already."""
    execution, (ordinal, size) = row.execution, place
    task = execution.task
    prefix = f"{source}:" if rename else ""
    origin = {"run": parent, "task": task.id, "sequence": row.sequence}
    task = msgspec.structs.replace(
        task,
        id=prefix + task.id,
        run=run,
        source=source,
        ordinal=ordinal,
        group=prefix + task.group,
        group_size=size,
        attempt=0,
        metadata={**task.metadata, _ORIGIN: origin},
    )
    samples = [relabel.sample(sample) for sample in execution.samples]
    return msgspec.structs.replace(execution, id=prefix + execution.id, task=task, samples=samples)


async def feed(
    run: OpenRun, rows: Iterator[Row], choice: Choice, source: str, relabel: Relabel, parent: str, *, rename: bool
) -> None:
    """Publishes the chosen rows in the order of the log, one after the other, then says that the source has issued them.

    Interrupted and begun again it stores each once more at most: the planner knows ordinals.
    """
    context = context_of(run)
    for row in rows:
        place = choice.taken.get(row.sequence)
        if place is not None:
            execution = adapted(row, run.name, source, place, relabel, parent, rename)
            await publish_execution(context, "samples", execution)
    positions: Register[states.SourcePosition] = Register(run.bus, run.publisher, "run", states.SourcePosition)
    position = states.SourcePosition(epoch=0, index=0, issued=len(choice.taken), token=0, finished=True)
    await positions.put(position, states.SOURCE_POSITION, source)
