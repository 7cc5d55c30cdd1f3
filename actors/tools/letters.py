"""Dead letters and what a person decided about them: retried, or dropped.

A decision is a mark beside the letter (`marks.py`); `dead ls` shows letters without one. How the account sees a letter:

    no mark     dead
    dropped     dead: given up by a person, no longer listed
    retried     in flight, or wherever its execution went; dead again only when it is found nowhere else
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import msgspec

from physarum.actors.policies import TRAINER, trainer_instance
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError, RunUnfitError
from physarum.actors.tools.marks import DeadMark, read_marks, write_mark
from physarum.actors.wire import read_header
from physarum.bus import control, log
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError, CodecError
from physarum.bus.names import RUN_HEADER
from physarum.bus.records import Execution, Task
from physarum.bus.work import DeadLetter

_log = logging.getLogger(__name__)

_OURS: Final = "Nats-"
"""Headers with this prefix belong to the message as it was stored, not to what it says."""


class Letter(NamedTuple):
    """A dead letter by its sequence in DEAD, which is its id."""

    id: int
    letter: DeadLetter
    mark: DeadMark | None

    @property
    def state(self) -> str:
        return "dead" if self.mark is None else self.mark.action

    @property
    def task(self) -> Task | None:
        """The task that the letter is about; None where its bytes cannot be read."""
        try:
            if self.letter.stream.endswith("_EPISODES"):
                return decode(self.letter.body, Execution).task
            return decode(self.letter.body, Task)
        except CodecError:
            return None

    @property
    def task_id(self) -> str | None:
        """Also where the body is elsewhere (by reference): then from the header."""
        if (task := self.task) is not None:
            return task.id
        try:
            return read_header(self.letter.headers).task
        except CodecError:
            return None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `dead ls`; `task` is null where the letter's bytes cannot be read."""

    id: int
    state: str
    task: str | None
    stream: str
    reason: str
    deliveries: int
    worker: str
    at: float


async def letters(bus: Bus) -> list[Letter]:
    """Every dead letter of the run, oldest first, with what was decided about it."""
    marks = await read_marks(bus)
    found = await log.scan(bus, "dead")
    return [Letter(entry.sequence, decode(entry.data, DeadLetter), marks.get(entry.sequence)) for entry in found]


async def find(bus: Bus, wanted: int) -> Letter:
    """Raises NotInRunError naming the ids that there are."""
    found = await letters(bus)
    for letter in found:
        if letter.id == wanted:
            return letter
    there = ", ".join(str(letter.id) for letter in found) or "none"
    raise NotInRunError(f"run {bus.run} has no dead letter {wanted}; there are: {there}")


def row(letter: Letter) -> Row:
    return Row(
        id=letter.id,
        state=letter.state,
        task=letter.task_id,
        stream=letter.letter.stream.rpartition("_")[2],
        reason=letter.letter.reason,
        deliveries=letter.letter.deliveries,
        worker=letter.letter.worker,
        at=letter.letter.at,
    )


async def retry(run: OpenRun, letter: Letter) -> None:
    """Publishes the letter's message again where it was, its attempt unchanged, under a message id of its own.

    The mark comes first: a crash between the two leaves a letter that counts as dead (nothing of it is found elsewhere)
    and can be retried again; the message id keeps a repetition from being stored twice.
    Raises RunUnfitError when nothing would take it.
    """
    _refuse_retry(run, letter)
    found = letter.letter
    await write_mark(run.bus, run.publisher, letter.id, "retried")
    await _tell_trainer(run, letter.id)
    headers = {name: text for name, text in found.headers.items() if not name.startswith(_OURS)}
    await run.publisher.publish(
        found.subject, found.body, message_id=f"retry/{letter.id}/{found.key}", headers=headers, deadline_s=30.0
    )


async def drop(run: OpenRun, letter: Letter) -> None:
    """Gives the letter up for good: it stays in the account as dead, and is listed no longer."""
    if letter.state == "retried":
        raise RunUnfitError(f"dead letter {letter.id} was retried already: what became of it is not ours to drop")
    await write_mark(run.bus, run.publisher, letter.id, "dropped")


async def _tell_trainer(run: OpenRun, number: int) -> None:
    """A trainer at work took the death in: its group is to wait again. One that starts later reads the mark."""
    for trainer in (trainer_instance(view.policy) for view in run.config.views()):
        try:
            answer = await control.call(run.bus, TRAINER, trainer, "revive", {"letter": number}, run.bus.timeout_s)
        except BusRefusedError:
            continue
        if "error" in answer:
            _log.info("%s was not told of letter %d: %s", trainer, number, answer["error"])


def _refuse_retry(run: OpenRun, letter: Letter) -> None:
    if run.finished:
        raise RunUnfitError(
            f"run {run.name} is finished: nothing would take dead letter {letter.id}. Start a run that goes on from it"
            " (actorctl fork), or leave the letter"
        )
    found = letter.letter.headers.get(RUN_HEADER)
    if found != run.name:
        raise RunUnfitError(f"dead letter {letter.id} is of run {found!r}, not of {run.name!r}; it can only be dropped")
