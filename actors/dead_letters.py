"""Which task a dead letter was: read from a TASKS message's body, or from an EPISODES message's header."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from physarum.actors.wire import read_header
from physarum.bus.codec import decode
from physarum.bus.errors import CodecError
from physarum.bus.log import LogEntry
from physarum.bus.names import RUN_HEADER
from physarum.bus.records import ExecutionHeader, Task
from physarum.bus.work import DeadLetter

_log = logging.getLogger(__name__)

_EVAL: Final = "eval"


class DeadTask(NamedTuple):
    """A dead task; `source` None: its bytes are altered, so nobody can say which one it was."""

    task: str
    source: str | None
    ordinal: int
    attempt: int
    group: str
    group_size: int
    member: int
    evaluation: bool
    reason: str
    final: bool = False
    """Another attempt would end the same."""


def dead_task(entry: LogEntry, run: str) -> DeadTask | None:
    """The task of one DEAD entry; None for messages of other runs, which were never tasks of ours.

    An entry that is no dead letter is named in the log and counted nowhere.
    """
    try:
        letter = decode(entry.data, DeadLetter)
    except CodecError as error:
        _log.error("DEAD #%d cannot be read: %s", entry.sequence, error)
        return None
    if letter.headers.get(RUN_HEADER) != run:
        return None
    _, _, stream, kind, *_ = letter.subject.split(".")
    evaluation = kind == _EVAL
    try:
        if stream == "tasks":
            task = decode(letter.body, Task)
            return _dead(task, task.id, letter, evaluation=evaluation)
        header = read_header(letter.headers)
        return _dead(header, header.task, letter, evaluation=evaluation)
    except CodecError as error:
        return DeadTask(letter.key, None, -1, 0, "", 0, 0, evaluation, f"{letter.reason}; {error}")


def _dead(of: Task | ExecutionHeader, task: str, letter: DeadLetter, *, evaluation: bool) -> DeadTask:
    return DeadTask(
        task=task,
        source=of.source,
        ordinal=of.ordinal,
        attempt=of.attempt,
        group=of.group,
        group_size=of.group_size,
        member=of.member,
        evaluation=evaluation,
        reason=letter.reason,
        final=letter.final,
    )
