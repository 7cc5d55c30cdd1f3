"""A row becomes the tasks of one group. Invariant: equal positions give equal ids and ordinals."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from physarum.bus.codec import encode
from physarum.bus.errors import CodecError
from physarum.bus.ledger import RefillRecord
from physarum.bus.records import Task, TaskClass
from physarum.configs.data_files import RowError
from physarum.configs.sampling import SamplingNameError, read_sampling

SAMPLING_KEY: Final = "sampling"
"""Of a row's metadata: its own sampling parameters, laid over the run's."""

_HEADERS_BYTES: Final = 2048
"""Room for what travels with a task: its id twice, and its run."""


def check_sampling(metadata: Mapping[str, Any], place: str, temperature: float | None = None) -> None:
    """Raises RowError where a row's own sampling is none. `temperature`: the only one that can be trained; None: any may be."""
    if metadata.get(SAMPLING_KEY) is None:
        return
    try:
        own = read_sampling(metadata[SAMPLING_KEY])
    except SamplingNameError as error:
        raise RowError(f"{place}: metadata.{SAMPLING_KEY}: {error}") from None
    if temperature is not None and own.get("temperature", temperature) != temperature:
        raise RowError(
            f"{place}: metadata.{SAMPLING_KEY}.temperature is {own['temperature']:g}; expected {temperature:g}, as"
            " rollout.sampling has it: the trainer computes every log-probability at that one"
        )


def group_tasks(
    row: dict[str, Any],
    *,
    run: str,
    source: str,
    place: str,
    first_ordinal: int,
    group_size: int,
    sampling: dict[str, Any],
    task_class: TaskClass = "p1",
    pin: int | None = None,
) -> list[Task]:
    """`group_size` tasks of one row. `place` (epoch/index, or the index alone) makes ids unique within the source."""
    own = (row.get("metadata") or {}).get(SAMPLING_KEY)
    group, sampling = f"{source}/{place}", {**sampling, **own} if isinstance(own, dict) else sampling
    issued_at = time.time()
    return [
        Task(
            id=f"{group}/{member}",
            run=run,
            source=source,
            ordinal=first_ordinal + member,
            group=group,
            group_size=group_size,
            member=member,
            task_class=task_class,
            prompt=row["prompt"],
            label=row.get("label"),
            metadata=row.get("metadata") or {},
            sampling=sampling,
            pin=pin,
            trace=uuid.uuid4().hex,
            issued_at=issued_at,
        )
        for member in range(group_size)
    ]


def refill_task(
    row: dict[str, Any],
    record: RefillRecord,
    *,
    run: str,
    group_size: int,
    sampling: dict[str, Any],
    pin: int | None = None,
) -> Task:
    """The member that `record` asks for, as it was issued first, with the next attempt in its id."""
    tasks = group_tasks(
        row,
        run=run,
        source=record.source,
        place=record.group.removeprefix(f"{record.source}/"),
        first_ordinal=record.ordinal - record.member,
        group_size=group_size,
        sampling=sampling,
        pin=pin,
    )
    task = tasks[record.member]
    return msgspec.structs.replace(task, id=f"{task.id}+{record.attempt}", attempt=record.attempt)


def check_travels(task: Task, limit_bytes: int) -> None:
    """Raises RowError for a task that the bus would refuse: a value without a wire form, or too many bytes. `limit_bytes`: of a
    message, headers included."""
    try:
        size = len(encode(task))
    except CodecError as error:
        raise RowError(f"{task.group}: {error}") from error
    if size > limit_bytes - _HEADERS_BYTES:
        expected = f"at most {limit_bytes} with headers (the bus's largest message)"
        raise RowError(f"{task.group}: {size} bytes; expected {expected}")
