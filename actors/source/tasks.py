"""A row becomes the tasks of one group. Invariant: equal positions give equal ids and ordinals."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from physarum.bus.codec import encode
from physarum.bus.errors import CodecError
from physarum.bus.ledger import RefillRecord
from physarum.bus.records import Task, TaskClass
from physarum.configs.data_files import RowError
from physarum.configs.rollout import SamplingConfig


def sampling_parameters(config: SamplingConfig) -> dict[str, Any]:
    """Sampling under SGLang's names; no stop tokens are named when there are none."""
    named: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_new_tokens,
    }
    return named | ({"stop_token_ids": list(config.stop_token_ids)} if config.stop_token_ids else {})


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
    group = f"{source}/{place}"
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
    """Raises RowError for a task that the bus would refuse: a value without a wire form, or too many bytes."""
    try:
        size = len(encode(task))
    except CodecError as error:
        raise RowError(f"{task.group}: {error}") from error
    if size > limit_bytes:
        raise RowError(f"{task.group}: {size} bytes; expected at most {limit_bytes} (the bus's largest message)")
