"""A row becomes the tasks of one group. Invariant: equal positions give equal ids and ordinals."""

from __future__ import annotations

import time
import uuid
from typing import Any

from physarum.bus.codec import encode
from physarum.bus.errors import CodecError
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
            trace=uuid.uuid4().hex,
            issued_at=issued_at,
        )
        for member in range(group_size)
    ]


def check_travels(task: Task, limit_bytes: int) -> None:
    """Raises RowError for a task that the bus would refuse: a value without a wire form, or too many bytes."""
    try:
        size = len(encode(task))
    except CodecError as error:
        raise RowError(f"{task.group}: {error}") from error
    if size > limit_bytes:
        raise RowError(f"{task.group}: {size} bytes; expected at most {limit_bytes} (the bus's largest message)")
