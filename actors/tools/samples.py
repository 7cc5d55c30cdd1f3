"""`ledger --sample ID`: where a task's execution is now, which steps it was part of, and which versions made its tokens.

The streams are read in the order in which an execution passes through them, the ledger last: it may be seen in two
places while it moves (the later one counts), but never in none.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from physarum.actors import states
from physarum.actors.tools import letters
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.book import Book, Bound
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.recorded import Recorded, readable_header
from physarum.actors.tools.steps import mean_reward, tokens_by_version
from physarum.bus import ledger, log, names
from physarum.bus.ledger import Dropped, Mask, Place, Planned
from physarum.bus.names import StreamKey
from physarum.bus.records import ExecutionHeader
from physarum.bus.register import Register

State = Literal["trained", "masked", "dropped", "dead", "planned", "in_flight", "not_issued", "lost"]

_DUPLICATE: Final = "duplicate"


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One physical execution of the task. `versions`: tokens that may carry gradient, by the version that made them."""

    stream: str
    sequence: int
    execution: str
    reward: float | None
    versions: dict[str, int]
    lengths: list[int]
    """Tokens of each of its samples."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that the execution is in. `dropped`: the reason why the plan left it out; null when it was trained or masked."""

    step: int | None
    """The number of the weights after the step; null while the plan is not executed."""
    epoch: int
    plan: int
    sequence: int
    void: bool
    provisional: bool
    dropped: str | None = None
    advantage: float | None = None
    trained_tokens: int = 0
    masked_tokens: int = 0
    masks: list[Mask] = []


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    """A task. `where` says in words where its execution lies; `reason` why it was dropped or died."""

    task: str
    state: State
    where: str
    reason: str | None
    copies: list[Copy]
    uses: list[Use]
    letters: list[letters.Row]


async def sample_view(run: OpenRun, wanted: str) -> SampleView:
    """`wanted`: the id of a task, or of an execution. Raises NotInRunError for what never was in the run."""
    task = wanted.rpartition(":")[0] if ":" in wanted else wanted
    issued = await _issued(run, task)
    queued = await _stored(run, "tasks", task)
    copies = [*await _copies(run, "episodes", task), *await _copies(run, "samples", task), *await _archived(run, task)]
    dead = [letters.row(one) for one in await letters.letters(run.bus) if one.task_id == task]
    uses = _uses(Book(await ledger.read(run.bus, key=run.ledger)), task)
    state, where, reason = _place(bool(queued), copies, uses, dead, issued)
    if state == "not_issued":
        raise NotInRunError(f"run {run.name} has no task {task}: {where}")
    return SampleView(task=task, state=state, where=where, reason=reason, copies=copies, uses=uses, letters=dead)


def _token(task: str) -> str:
    """The task's id as one token of a subject."""
    return names.subject("x", "tasks", task).rpartition(".")[2]


async def _stored(run: OpenRun, key: StreamKey, task: str) -> list[log.LogEntry]:
    """What a stream holds of the task, inline or by reference."""
    subject = f"ph.{run.name}.{key}.*.{_token(task)}"
    return [*await log.scan(run.bus, key, subject), *await log.scan(run.bus, key, f"{subject}.>")]


async def _copies(run: OpenRun, key: StreamKey, task: str) -> list[Copy]:
    """The executions of the task that a stream holds: all of them share one subject."""
    found = await _stored(run, key, task)
    return [_copy(key, entry.sequence, header) for entry in found if (header := readable_header(entry)) is not None]


async def _archived(run: OpenRun, task: str) -> list[Copy]:
    """Executions of the task that are archived: each segment is read, since nothing indexes it."""
    recorded = await Recorded.open(run.bus, run.folder)
    found: list[Copy] = []
    async for entry in recorded.archived():
        header = readable_header(entry)
        if header is not None and header.task == task:
            found.append(_copy("archive", entry.sequence, header))
    return found


def _copy(stream: str, sequence: int, header: ExecutionHeader) -> Copy:
    return Copy(
        stream=stream,
        sequence=sequence,
        execution=header.execution,
        reward=mean_reward(header),
        versions=tokens_by_version(header),
        lengths=[sample.tokens for sample in header.samples],
    )


def _uses(book: Book, task: str) -> list[Use]:
    """Every plan that holds the task, in order of the ledger, void ones and those under way included."""
    found = [_use(book, bound, place) for bound in book.steps for place in bound.plan.places if place.task == task]
    for sequence, plan in book.plans_under_way():
        found += [
            Use(step=None, epoch=plan.epoch, plan=sequence, sequence=one.sequence, void=False, provisional=True)
            for one in plan.places
            if one.task == task
        ]
    return found


def _use(book: Book, bound: Bound, place: Place) -> Use:
    step = bound.step
    bare = Use(
        step=step.number,
        epoch=step.epoch,
        plan=step.plan,
        sequence=place.sequence,
        void=bound.void,
        provisional=book.provisional(step),
    )
    match place:
        case Dropped():
            return msgspec.structs.replace(bare, dropped=place.reason)
        case Planned():
            return msgspec.structs.replace(
                bare,
                dropped="refused" if step.refused else None,
                advantage=place.advantage,
                trained_tokens=place.trained_tokens,
                masked_tokens=place.masked_tokens,
                masks=place.masks,
            )
    return bare


def _place(
    queued: bool, copies: list[Copy], uses: list[Use], dead: list[letters.Row], issued: str | None
) -> tuple[State, str, str | None]:
    """(state, where, reason), by the same precedence as the account's."""
    counting = [use for use in uses if not use.void and use.step is not None]
    for use in counting:
        if use.dropped is None:
            state: State = "trained" if use.trained_tokens else "masked"
            return state, f"step {use.step}" + (" (provisional)" if use.provisional else ""), None
    for use in counting:
        if use.dropped != _DUPLICATE:
            return "dropped", f"plan {use.plan}", use.dropped
    given_up = next((letter for letter in dead if letter.state != "retried"), None)
    if given_up is not None:
        return "dead", f"DEAD #{given_up.id}", given_up.reason
    if any(use.step is None for use in uses):
        return "planned", f"plan {uses[-1].plan}, whose step is not done", None
    for stream in ("samples", "episodes"):
        place = next((copy for copy in copies if copy.stream == stream), None)
        if place is not None:
            return "in_flight", f"{stream.upper()} #{place.sequence}", None
    if queued:
        return "in_flight", "TASKS", None
    if dead:
        return "dead", f"DEAD #{dead[-1].id} (retried, and found nowhere else)", dead[-1].reason
    if issued is None:
        return "lost", "nowhere, though its source has issued it: the account shows an imbalance", None
    return "not_issued", issued, None


async def _issued(run: OpenRun, task: str) -> str | None:
    """None when the source's position has passed the task; else why it cannot be in the run."""
    parts = task.partition("+")[0].split("/")
    epochs = [*parts[1:2]] if parts[1:2] != ["added"] else []
    if len(parts) != 4 or not all(part.isdigit() for part in (*epochs, *parts[2:])):
        return "expected the id of a task (source/epoch/index/member) or of an execution"
    register: Register[states.SourcePosition] = Register(run.bus, run.publisher, "run", states.SourcePosition)
    position = (await register.get(states.SOURCE_POSITION, parts[0])).value
    if position is None:
        return f"no source {parts[0]!r} has issued anything"
    if not epochs:
        issued = int(parts[2]) <= position.added_through
        return None if issued else f"added rows are issued up to {position.added_through}; this one is not issued yet"
    if (int(parts[1]), int(parts[2])) < (position.epoch, position.index):
        return None
    return f"the source is at epoch {position.epoch}, row {position.index}; this one is not issued yet"
