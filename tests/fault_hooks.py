"""Rows and episodes of the fault tests. A task's prompt says what its episode does; files count its tries.

The tokens of an execution are a function of its task alone, so that a batch can be recomputed from the ledger.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import numpy as np

from physarum.agents.protocols import Client
from physarum.agents.trajectory import Trajectory
from physarum.bus.records import Execution, ExecutionHeader, Sample, Task
from physarum.bus.version import Span


class Rows:
    """`size` rows; `habits` gives the prompt of a row by its index, "good" where it gives none."""

    def __init__(self, seed: int, *, size: int, habits: dict[str, str] | None = None) -> None:
        self._size, self._habits = size, habits or {}

    def __len__(self) -> int:
        return self._size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return {"prompt": self._habits.get(str(index), "good")}


def tokens_of(ordinal: int, attempt: int = 0) -> list[int]:
    """Two prompt tokens, then the task's own number, digit by digit in base 1000."""
    return [1, 2, ordinal // 1_000_000, ordinal // 1000 % 1000, ordinal % 1000, attempt]


def sample(ordinal: int, attempt: int = 0, padding: int = 0) -> Sample:
    """A demonstration, so that no engine is needed; `padding` more tokens make it as large as a test wants it."""
    ids = np.array(tokens_of(ordinal, attempt) + [0] * padding, dtype=np.int32)
    response = len(ids) - 2
    return Sample(
        token_ids=ids,
        prompt_len=2,
        loss_mask=np.ones(response, np.bool_),
        logprobs=np.full(response, np.nan, np.float32),
        origin="demonstration",
    )


async def generate(
    task: Task, client: Client, *, folder: str = "", seconds: float = 0.0, padding: int = 0
) -> list[Sample]:
    """Hook `rollout.generate`. "WORD SIZE" misbehaves for the first SIZE tries; "WORD" always."""
    word, _, limit = str(task.prompt).partition(" ")
    if word != "good" and (not limit or _tries(folder, task) <= int(limit)):
        misbehaved = await _misbehave(word, task, Path(folder))
        if misbehaved is not None:
            return misbehaved
    await asyncio.sleep(seconds)
    return [sample(task.ordinal, task.attempt, padding)]


async def _misbehave(word: str, task: Task, folder: Path) -> Any:
    if word == "raise":
        raise ValueError(f"no luck with {task.id}")
    if word == "cancel":
        reader = asyncio.create_task(asyncio.Event().wait())
        reader.cancel()
        await reader
    if word == "hang":
        await asyncio.Event().wait()
    if word == "timeout":
        raise TimeoutError("the calculator did not answer")
    if word == "text":
        return ["not a sample"]
    if word == "nothing":
        return []
    if word == "unsendable":
        made = sample(task.ordinal)
        made.outputs["it"] = object()
        return [made]
    if word == "countless":
        return [sample(task.ordinal) for _ in range(600)]
    if word == "die-first" and task.attempt == 0:
        raise ValueError("the first attempt dies")
    if word == "second-waits" and task.member == 1:
        while not (folder / "go").exists():
            await asyncio.sleep(0.02)
    if word == "second-hangs" and task.member == 1:
        await asyncio.Event().wait()
    return None


def _tries(folder: str, task: Task) -> int:
    """Counts this try; across processes, too."""
    place = Path(folder)
    number = len(list(place.glob(f"try-{task.ordinal}.{task.attempt}-*"))) + 1
    (place / f"try-{task.ordinal}.{task.attempt}-{number}").touch()
    return number


async def ask(task: Task, client: Client, *, folder: str = "") -> list[Sample]:
    """One generation by an engine, whose request id begins with the task's id."""
    made = await client.generate([1, 2, task.ordinal])
    return [
        Sample(
            token_ids=np.concatenate([np.array([1, 2, task.ordinal], np.int32), made.token_ids]),
            prompt_len=3,
            loss_mask=np.ones(len(made.token_ids), np.bool_),
            logprobs=made.logprobs,
            spans=made.spans,
        )
    ]


async def aged(task: Task, client: Client, *, folder: str = "") -> list[Sample]:
    """A first attempt claims to be made by weights 0; a refill by weights that are young for ever."""
    made = sample(task.ordinal, task.attempt)
    number = 0 if task.attempt == 0 else 1_000_000
    response = made.response_len
    return [
        Sample(
            token_ids=made.token_ids,
            prompt_len=made.prompt_len,
            loss_mask=made.loss_mask,
            logprobs=np.zeros(response, np.float32),
            spans=[Span(f"policy@1.{number}", 0, response)],
        )
    ]


SOLVERS: Final = 500
"""In the place of the attempt, in the tokens of the policy "solver"."""


async def two_policies(
    task: Task, client: Client, *, folder: str = "", seconds: float = 0.0, padding: int = 0
) -> list[Sample]:
    """One sample of each policy, the solver's first; by the ordinal, some tasks are of one policy alone."""
    if str(task.prompt) == "die-first" and task.attempt == 0:
        raise ValueError("the first attempt dies")
    await asyncio.sleep(seconds)
    marks = {"solver": SOLVERS, "policy": 0}
    made = {
        name: sample(task.ordinal, task.attempt + mark, padding)
        for name, mark in marks.items()
        if plays(name, task.ordinal)
    }
    for name, one in made.items():
        one.origin, one.logprobs = "policy", np.zeros(one.response_len, np.float32)
        one.spans = [Span(f"{name}@1.0", 0, one.response_len)]
    return list(made.values())


def plays(policy: str, ordinal: int) -> bool:
    """Whether `two_policies` has a sample of it."""
    alone = ordinal % 7 == 0
    return not alone if policy == "policy" else alone or ordinal % 3 != 1


async def ask_twice(task: Task, client: Client, **_unused: Any) -> list[Sample]:
    """Two turns of the policy, with one token of the environment between them."""
    trajectory = Trajectory([1, 2, task.ordinal])
    for turn in range(2):
        trajectory.append_generated(await client.generate(trajectory.token_ids))
        if turn == 0:
            trajectory.append_environment([9])
    return [trajectory.sample()]


def row_at_least(headers: list[ExecutionHeader], row: int) -> bool:
    """A filter: groups of rows before `row` are rejected."""
    return all(int(header.group.rpartition("/")[2]) >= row for header in headers)


def no_reward(execution: Execution) -> float:
    """The same for all."""
    return 0.0
