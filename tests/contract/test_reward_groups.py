"""Members of a group are scored together, wherever and in whatever order they come; each gets its own reward."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_fixture import actor_process, eventually, make_context, register_until, running
from bus_fixture import DEADLINE_S, small_config

from physarum.actors.context import Context
from physarum.actors.reward.actor import RewardActor
from physarum.actors.reward.grouped import LEASE
from physarum.actors.reward.shares import owner_of
from physarum.actors.wire import publish_execution, read_execution, read_header
from physarum.bus import layout, log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.lease import LeaseRecord
from physarum.bus.log import LogReader
from physarum.bus.names import StreamKey
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.register import Register
from physarum.bus.work import DeadLetter

HOOKS = Path(__file__).parents[1] / "group_hooks.py"
SIZE = 3
PARTITIONS = 4


def context_of(folder: Path, bus: Bus, publisher: Publisher, *overrides: str, **options: Any) -> Context:
    hook = f"reward.group.hook={HOOKS}:{options.get('hook', 'ranked')}"
    base = ("reward.hook=null", "reward.group={}", hook) if options.get("alone", True) else ("reward.group={}", hook)
    return make_context(folder, bus, publisher, "reward", *base, *overrides, instance=options.get("instance"))


def member(
    run: str, group: str, number: int, prompt: str, *, attempt: str = "x", evaluation: bool = False
) -> Execution:
    task = Task(
        id=f"{group}/{number}", run=run, source="main", ordinal=number, group=group, group_size=SIZE, member=number,
        prompt=prompt, task_class="eval" if evaluation else "p1",
    )  # fmt: skip
    sample = Sample(
        token_ids=np.arange(4, dtype=np.int32), prompt_len=1, loss_mask=np.zeros(3, np.bool_),
        logprobs=np.full(3, np.nan, np.float32), origin="demonstration",
    )  # fmt: skip
    return Execution(
        id=f"{task.id}:{attempt}", task=task, samples=[sample], worker="test", started_at=0.0, finished_at=1.0
    )


async def submit(context: Context, *executions: Execution) -> None:
    for one in executions:
        await publish_execution(context, "episodes", one)


async def entries(bus: Bus, key: StreamKey, count: int) -> list[log.LogEntry]:
    found: list[log.LogEntry] = []
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(LogReader(bus, key).batches(0.5)) as batches:
        async for batch in batches:
            found += batch
            if len(found) >= count:
                break
    return found


async def rewards(context: Context, count: int, key: StreamKey = "samples") -> dict[str, float | None]:
    """By execution."""
    found = [await read_execution(context, one.headers, one.data) for one in await entries(context.bus, key, count)]
    return {one.id: one.samples[0].reward for one in found}


async def compared(bus: Bus, count: int) -> dict[str, tuple[int, ...] | None]:
    """By execution."""
    headers = [read_header(one.headers) for one in await entries(bus, "samples", count)]
    return {one.execution: one.compared for one in headers}


async def left(bus: Bus) -> int:
    return (await log.state(bus, "episodes")).messages


async def test_members_of_many_groups_come_in_any_order_and_each_gets_its_own_place(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = context_of(tmp_path, bus, publisher, "reward.workers=2")
    rng = random.Random(5)
    worth = {f"main/0/{group}/{number}": rng.random() for group in range(12) for number in range(SIZE)}
    made = [member(bus.run, name.rpartition("/")[0], int(name[-1]), str(value)) for name, value in worth.items()]
    await submit(context, *rng.sample(made, len(made)))
    actor = RewardActor(context)
    async with running(actor):
        found = await rewards(context, len(made))
    for name, value in worth.items():
        others = [worth[f"{name.rpartition('/')[0]}/{number}"] for number in range(SIZE)]
        assert found[f"{name}:x"] == float(sum(other < value for other in others))
    assert actor.numbers["scored"] == len(made) and await left(bus) == 0


async def test_a_group_is_not_scored_before_its_last_member_unless_nobody_comes_for_long(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = context_of(tmp_path, bus, publisher, "reward.group.wait_s=0.5")
    async with running(RewardActor(context)):
        await submit(context, member(bus.run, "g", 0, "5"), member(bus.run, "g", 2, "7"))
        assert await rewards(context, 2) == {"g/0:x": 0.0, "g/2:x": 1.0}
        await submit(context, member(bus.run, "g", 1, "6"))  # too late: nobody is left to compare it with
        assert (await rewards(context, 3))["g/1:x"] is None
        assert await compared(bus, 3) == {"g/0:x": (0, 2), "g/2:x": (0, 2), "g/1:x": ()}
    assert await left(bus) == 0


async def test_a_group_of_which_enough_came_waits_for_nobody(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = context_of(tmp_path, bus, publisher, "groups.enough=2", f"source.group_size={SIZE}")
    async with running(RewardActor(context)):
        await submit(context, member(bus.run, "g", 2, "5"), member(bus.run, "g", 0, "7"))
        assert await rewards(context, 2) == {"g/0:x": 1.0, "g/2:x": 0.0}
        await submit(context, member(bus.run, "g", 1, "6"))
        assert await compared(bus, 3) == {"g/0:x": (0, 2), "g/2:x": (0, 2), "g/1:x": ()}
    assert await left(bus) == 0


async def test_those_that_came_while_a_comparison_failed_are_compared_soon(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are enough without the ones that were buried, and waited for `wait_s`."""
    monkeypatch.setattr("physarum.actors.reward.grouped._AGAIN_S", 0.1)
    limits = ("groups.enough=1", "reward.group.timeout_s=1", "bus.max_deliver=1")
    context = context_of(tmp_path, bus, publisher, *limits, f"source.group_size={SIZE}")
    actor = RewardActor(context)
    async with running(actor):
        await submit(
            context, member(bus.run, "g", 0, "hang"), member(bus.run, "g", 1, "5"), member(bus.run, "g", 2, "7")
        )
        assert len(await entries(bus, "dead", 1)) == 1
        assert await rewards(context, 2) == {"g/1:x": 0.0, "g/2:x": 1.0}
    assert await left(bus) == 0


async def test_a_groups_deadline_counts_from_its_first_member(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """`groups.deadline_s` did nothing here: the group waited for `wait_s` after each member."""
    context = context_of(tmp_path, bus, publisher, "groups.deadline_s=0.5")
    async with running(RewardActor(context)):
        await submit(context, member(bus.run, "g", 0, "5"))
        assert await rewards(context, 1) == {"g/0:x": 0.0}
    assert await left(bus) == 0


@pytest.mark.slow
async def test_a_task_that_was_executed_twice_is_compared_once(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = context_of(tmp_path, bus, publisher)
    twice = [member(bus.run, "g", 0, "9"), member(bus.run, "g", 0, "1", attempt="y")]
    await submit(context, *twice, member(bus.run, "g", 1, "2"), member(bus.run, "g", 2, "3"))
    async with running(RewardActor(context)):
        found = await rewards(context, 4)
    assert sorted(found) == ["g/0:x", "g/0:y", "g/1:x", "g/2:x"]
    assert found["g/0:x"] == found["g/0:y"]  # the planner trains the first of them and drops the other
    assert await left(bus) == 0


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("raise", "group g: the reward hook raised ValueError: nothing to compare"),
        pytest.param("short", "group g: the group reward hook returned [1.0] for 3 executions", marks=pytest.mark.slow),
        pytest.param(
            "hang",
            "group g: the reward hook did not return within reward.group.timeout_s = 0.5 s",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_failing_hook_costs_its_own_group_its_tries_and_no_other(
    tmp_path: Path, bus: Bus, publisher: Publisher, prompt: str, reason: str
) -> None:
    context = context_of(tmp_path, bus, publisher, "reward.group.timeout_s=0.5")
    await submit(context, *(member(bus.run, "g", number, prompt if number == 1 else "1") for number in range(SIZE)))
    await submit(context, *(member(bus.run, "h", number, str(number)) for number in range(SIZE)))
    async with running(RewardActor(context)):
        letters = [decode(entry.data, DeadLetter) for entry in await entries(bus, "dead", SIZE)]
        assert await rewards(context, SIZE) == {"h/0:x": 0.0, "h/1:x": 1.0, "h/2:x": 2.0}
    assert {decode(letter.body, Execution).task.group for letter in letters} == {"g"}
    assert all(letter.reason.startswith(reason) and letter.deliveries == 2 for letter in letters)
    assert await left(bus) == 0


@pytest.mark.slow
async def test_a_reward_of_ones_own_comes_before_the_groups_and_evaluations_keep_it(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = context_of(
        tmp_path, bus, publisher, f"reward.hook={HOOKS}:own", "reward.group.wait_s=3", hook="doubled", alone=False
    )
    await submit(context, *(member(bus.run, "g", number, str(number)) for number in range(SIZE)))
    await submit(context, member(bus.run, "e", 0, "4", evaluation=True))
    await submit(context, member(bus.run, "h", 0, "bad"), member(bus.run, "h", 1, "1"), member(bus.run, "h", 2, "2"))
    async with running(RewardActor(context)):
        found = await rewards(context, 2 * SIZE - 1)
        assert await rewards(context, 1, "evals") == {"e/0:x": 4.0}
        (letter,) = [decode(entry.data, DeadLetter) for entry in await entries(bus, "dead", 1)]
    assert found == {"g/0:x": 0.0, "g/1:x": 2.0, "g/2:x": 4.0, "h/1:x": 2.0, "h/2:x": 4.0}
    assert "cannot be scored" in letter.reason


async def test_who_ends_gives_its_members_back_and_the_next_one_completes_them(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    first = context_of(tmp_path, bus, publisher, instance="reward-0")
    await submit(first, member(bus.run, "g", 0, "1"), member(bus.run, "g", 1, "2"))
    second = RewardActor(context_of(tmp_path, bus, publisher, "reward.group.wait_s=600", instance="reward-1"))
    actor = RewardActor(first)
    async with running(actor):
        await eventually(lambda: actor.numbers.get("waiting") == 2)
    async with running(second):
        await submit(first, member(bus.run, "g", 2, "3"))
        assert await rewards(first, SIZE) == {"g/0:x": 0.0, "g/1:x": 1.0, "g/2:x": 2.0}
    assert await left(bus) == 0


@pytest.mark.slow
async def test_a_killed_leader_is_followed_by_the_one_that_stood_by(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Both processes run; only the leader gathers, and after SIGKILL the other one has all members delivered again."""
    contexts = [
        context_of(tmp_path, bus, publisher, "bus.max_deliver=5", instance=f"reward-{number}") for number in range(2)
    ]
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(actor_process(one)) for one in contexts]
        await submit(contexts[0], member(bus.run, "g", 0, "1"), member(bus.run, "g", 1, "2"))
        leader = await _leader(bus, publisher)
        actors[leader].kill()
        await submit(contexts[0], member(bus.run, "g", 2, "3"))
        assert await rewards(contexts[0], SIZE) == {"g/0:x": 0.0, "g/1:x": 1.0, "g/2:x": 2.0}
        other = actors[1 - leader]
        assert await asyncio.to_thread(other.drain) == 0, other.log.read_text()
    assert await left(bus) == 0


async def _leader(bus: Bus, publisher: Publisher) -> int:
    """Which of the two leads."""
    record = await register_until(Register(bus, publisher, "lease", LeaseRecord), lambda one: one.token > 0, LEASE)
    return int(record.owner[-1])


async def owned(bus: Bus, publisher: Publisher, names_of: list[str]) -> None:
    """Returns once each partition is owned by the one of these whose it is."""
    register = Register(bus, publisher, "lease", LeaseRecord)
    for partition in range(PARTITIONS):
        owner = owner_of(partition, names_of)
        await register_until(
            register, lambda one, owner=owner: one.owner == owner and one.token > 0, f"{LEASE}-{partition}"
        )


async def test_groups_are_shared_by_partitions_and_those_of_one_that_dies_are_gathered_by_the_other(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    await layout.create(bus, small_config(), partitions=range(PARTITIONS))
    names_of = ["reward-0", "reward-1"]
    options = (f"reward.group.partitions={PARTITIONS}", "reward.count=2", "bus.max_deliver=5")
    contexts = [context_of(tmp_path, bus, publisher, *options, instance=name) for name in names_of]
    groups = [f"main/0/{number}" for number in range(8)]
    made = [member(bus.run, group, number, str(number)) for group in groups for number in range(SIZE)]
    with contextlib.ExitStack() as stack:
        actors = [stack.enter_context(actor_process(one)) for one in contexts]
        await owned(bus, publisher, names_of)
        await submit(contexts[0], *made[:-1])
        found = await rewards(contexts[0], len(made) - SIZE)
        assert found == {f"{group}/{number}:x": float(number) for group in groups[:-1] for number in range(SIZE)}
        dying = names_of.index(owner_of(names.partition_of(groups[-1], PARTITIONS), names_of))
        actors[dying].kill()
        await submit(contexts[0], made[-1])
        assert len(await rewards(contexts[0], len(made))) == len(made)
        await owned(bus, publisher, [names_of[1 - dying]])
        assert await asyncio.to_thread(actors[1 - dying].drain) == 0, actors[1 - dying].log.read_text()
    assert await left(bus) == 0
