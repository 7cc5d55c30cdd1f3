"""Several calls at once in one hook process: each has its own end, whatever the others do. Real processes, no bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from physarum.actors.errors import HookFailedError
from physarum.actors.reward.errors import HookDiedError, HookTimeoutError
from physarum.actors.reward.frames import Limits
from physarum.actors.reward.pool import Pool
from physarum.bus.codec import encode
from physarum.bus.records import Execution, Sample, Task

HOOKS = Path(__file__).parents[1] / "pool_hooks.py"


def body(prompt: str) -> bytes:
    task = Task(id="t", run="r", source="s", ordinal=0, group="g", group_size=1, member=0, prompt=prompt)
    sample = Sample(
        token_ids=np.arange(2, dtype=np.int32), prompt_len=1, loss_mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32), origin="demonstration",
    )  # fmt: skip
    return encode(Execution(id="e", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=0.0))


@asynccontextmanager
async def pool(hook: str, limits: Limits, **args: Any) -> AsyncIterator[Pool]:
    async with asyncio.timeout(60), Pool(f"{HOOKS}:{hook}", args, 1, limits).open() as opened:
        yield opened


async def scores(opened: Pool, *prompts: str) -> list[Any]:
    """The value of each call, or what it failed with."""
    return await asyncio.gather(*(opened.score(body(prompt)) for prompt in prompts), return_exceptions=True)


async def test_calls_that_wait_for_each_other_end_in_one_process() -> None:
    async with pool("meet", Limits(timeout_s=30, concurrency=5), parties=5) as opened:
        assert await scores(opened, "4", "3", "2", "1", "0") == [4.0, 3.0, 2.0, 1.0, 0.0]
        assert opened.capacity == 5


async def test_a_call_that_waits_too_long_is_cancelled_and_its_neighbours_are_not() -> None:
    async with pool("by_prompt", Limits(timeout_s=0.5, concurrency=3)) as opened:
        late, raised, *fine = await scores(opened, "wait", "raise", "soon", "soon", "soon")
    assert isinstance(late, HookTimeoutError) and "it was cancelled" in str(late)
    assert type(raised) is HookFailedError and "no such answer" in str(raised)
    assert fine == [1.0] * 3


async def test_the_one_that_ends_the_process_is_charged_and_those_beside_it_are_not() -> None:
    async with pool("by_prompt", Limits(timeout_s=30, concurrency=4)) as opened:
        first, died, *fine = await scores(opened, "soon", "exit", "soon", "soon", "soon", "soon")
    assert isinstance(died, HookDiedError) and "status 3" in str(died)
    assert [first, *fine] == [1.0] * 5


async def test_one_that_writes_to_the_pipe_of_replies_fails_and_the_pool_goes_on() -> None:
    """It ended the reward actor, and so did every try of its task."""
    async with pool("by_prompt", Limits(timeout_s=30)) as opened:
        garbled, *fine = await scores(opened, "garble", "soon", "soon")
    assert isinstance(garbled, HookDiedError) and "to the pipe of its replies" in str(garbled)
    assert fine == [1.0] * 2


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize(
    ("habit", "told"),
    [
        ("interrupt", "KeyboardInterrupt: "),
        ("cancel", "CancelledError: "),
        ("untold", "_UntoldError: (its text could not be made: RuntimeError)"),
        ("half", r"ValueError: half a \ud83d character"),
    ],
)
async def test_whatever_a_hook_raises_is_told_and_its_process_goes_on(habit: str, told: str, concurrency: int) -> None:
    """They ended the process, and were told as "killed by SIGKILL (for reward.total_mib ...)"."""
    async with pool("by_prompt", Limits(timeout_s=30, concurrency=concurrency)) as opened:
        raised, fine = await scores(opened, habit, "soon")
    assert type(raised) is HookFailedError and told in str(raised)
    assert fine == 1.0


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_fork_that_returns_from_the_hook_too_answers_nothing(concurrency: int) -> None:
    async with pool("by_prompt", Limits(timeout_s=30, concurrency=concurrency)) as opened:
        assert await scores(opened, "return-twice", "soon", "return-twice", "soon") == [1.0] * 4


async def test_a_process_that_ends_a_while_after_its_pipe_is_told_by_its_own_end() -> None:
    async with pool("by_prompt", Limits(timeout_s=30)) as opened:
        left, fine = await scores(opened, "leave-slowly", "soon")
    assert isinstance(left, HookDiedError) and "exited with status 5" in str(left)
    assert fine == 1.0


@pytest.mark.slow
async def test_the_one_that_blocks_the_process_is_charged_and_those_beside_it_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("physarum.actors.reward.pool._GRACE_S", 0.2)
    async with pool("by_prompt", Limits(timeout_s=0.3, concurrency=2)) as opened:
        blocked, *fine = await scores(opened, "block", "soon", "soon")
    assert isinstance(blocked, HookTimeoutError) and "its process was killed" in str(blocked)
    assert fine == [1.0] * 2


@pytest.mark.slow
async def test_one_call_at_a_time_charges_only_the_running_one() -> None:
    async with pool("by_prompt", Limits(timeout_s=0.5)) as opened:
        first, blocked, last = await scores(opened, "soon", "block", "soon")
    assert (first, last) == (1.0, 1.0)
    assert isinstance(blocked, HookTimeoutError)


async def test_a_groups_hook_is_given_all_its_executions() -> None:
    async with pool("by_length", Limits(timeout_s=30, grouped=True)) as opened:
        assert await opened.score(body("a"), body("b"), body("c")) == [2.0, 2.0, 2.0]


async def test_a_hook_that_floods_memory_gets_an_error_and_its_process_goes_on() -> None:
    async with pool("by_prompt", Limits(timeout_s=30, memory_bytes=4 << 30)) as opened:
        flooded, fine = await scores(opened, "flood", "soon")
    assert type(flooded) is HookFailedError and "MemoryError" in str(flooded)
    assert fine == 1.0


def marked() -> list[int]:
    """Processes of the hooks of these tests, which carry the hook's file on their command line, and have not ended."""
    found = []
    for one in psutil.process_iter(["pid", "cmdline", "status"]):
        words = one.info["cmdline"] or []
        if any(str(HOOKS) in word for word in words) and one.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(one.info["pid"])
    return found


async def nobody_left() -> None:
    async with asyncio.timeout(20):
        while marked():
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("habit", "limits", "said"),
    [
        ("fork-flood", {"total_bytes": 384 << 20}, "MiB held; expected at most reward.total_mib = 384"),
        pytest.param(
            "fork-bomb",
            {"children": 50},
            "processes beside it; expected at most reward.children = 50",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "fork-bomb-apart",
            {"children": 50},
            "processes beside it; expected at most reward.children = 50",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_hook_whose_forks_flood_memory_or_the_machine_is_killed_with_all_of_them(
    habit: str, limits: dict[str, int], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each fork keeps within its own limits, as rlimits have it; nothing but this process bounds their sum."""
    async with pool("by_prompt", Limits(timeout_s=30, **limits)) as opened:  # type: ignore[arg-type]
        died, fine = await scores(opened, habit, "soon")
        assert isinstance(died, HookDiedError) and "reward.total_mib or reward.children" in str(died)
        assert fine == 1.0, "the next call has a process of its own"
    assert said in capfd.readouterr().err
    await nobody_left()


async def test_what_a_hook_moved_into_a_session_of_its_own_ends_with_it() -> None:
    async with pool("by_prompt", Limits(timeout_s=0.8)) as opened:
        assert isinstance((await scores(opened, "fork-bomb-apart"))[0], HookTimeoutError)
    await nobody_left()
