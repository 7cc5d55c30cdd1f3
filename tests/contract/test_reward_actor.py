"""Rewards that raise, hang, exit or return nonsense cost their own execution its tries; everything else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
from actor_fixture import actor_process, eventually, make_context, running
from bus_fixture import DEADLINE_S, OwnServer

from physarum.actors.context import Context
from physarum.actors.errors import UnrecoverableError
from physarum.actors.reward.actor import RewardActor
from physarum.actors.reward.family import lists_children
from physarum.actors.wire import publish_execution, read_body, read_execution, read_header
from physarum.bus import log, names
from physarum.bus.blobs import BlobRef, digest
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import BlobRefusedError, BlobUnreachableError
from physarum.bus.log import LogEntry, LogReader
from physarum.bus.names import SCORES_HEADER, StreamKey
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.work import DeadLetter

HOOKS = Path(__file__).parents[1] / "reward_hooks.py"
SAMPLES_NEAR_THE_LIMIT = 520


def execution(
    run: str, name: str, prompt: str, *, samples: int = 1, tokens: int = 3, evaluation: bool = False
) -> Execution:
    task = Task(
        id=f"main/0/{name}/0", run=run, source="main", ordinal=0, group=f"main/0/{name}", group_size=1, member=0,
        prompt=prompt, task_class="eval" if evaluation else "p1",
    )  # fmt: skip
    made = [
        Sample(
            token_ids=np.arange(1 + tokens, dtype=np.int32),
            prompt_len=1,
            loss_mask=np.zeros(tokens, np.bool_),
            logprobs=np.full(tokens, np.nan, np.float32),
            origin="demonstration",
        )
        for _ in range(samples)
    ]
    return Execution(id=f"{task.id}:x", task=task, samples=made, worker="test", started_at=0.0, finished_at=1.0)


async def read(bus: Bus, key: StreamKey, count: int) -> list[LogEntry]:
    found: list[LogEntry] = []
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(LogReader(bus, key).batches(0.5)) as batches:
        async for batch in batches:
            found += batch
            if len(found) >= count:
                break
    return found


async def scored(context: Context, count: int, key: StreamKey = "samples") -> dict[str, Execution]:
    """Executions by prompt."""
    entries = await read(context.bus, key, count)
    found = [await read_execution(context, entry.headers, entry.data) for entry in entries]
    return {one.task.prompt: one for one in found}


async def nothing_left(bus: Bus) -> None:
    """EPISODES is empty: everything was acknowledged."""
    state = await log.state(bus, "episodes")
    assert state.messages == 0


def alive(pid: int) -> bool:
    """A zombie whose new parent has not reaped it yet does not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def ended(processes: list[psutil.Process]) -> bool:
    return not [one for one in psutil.wait_procs(processes, timeout=5.0)[1] if alive(one.pid)]


def reward_context(folder: Path, bus: Bus, publisher: Publisher, *overrides: str, hook: str = "by_prompt") -> Context:
    return make_context(folder, bus, publisher, "reward", f"reward.hook={HOOKS}:{hook}", *overrides)


async def test_scores_go_to_samples_and_evaluations_to_evals(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = reward_context(tmp_path, bus, publisher, "reward.workers=2", "bus.inline_limit_bytes=65536")
    for name in ("one", "true", "parts", "umlaut", "numpy", "print"):
        await publish_execution(context, "episodes", execution(bus.run, name, name))
    await publish_execution(context, "episodes", execution(bus.run, "list", "list", samples=2, tokens=20_000))
    await publish_execution(context, "episodes", execution(bus.run, "eval", "one", evaluation=True))
    async with running(RewardActor(context)):
        found = await scored(context, 7)
        assert list(await scored(context, 1, "evals")) == ["one"]
    rewards = {prompt: [sample.reward for sample in one.samples] for prompt, one in found.items()}
    assert rewards == {
        "one": [1.0], "true": [1.0], "parts": [0.75], "umlaut": [0.5], "numpy": [0.5], "print": [2.0], "list": [1.0, 2.0],
    }  # fmt: skip
    assert found["parts"].samples[0].reward_parts == {"format": 0.25, "answer": 0.5}
    assert found["umlaut"].samples[0].reward_parts == {"größe": 0.5}
    assert found["list"].samples[1].reward_parts == {"a": 2.0}
    await nothing_left(bus)


async def evaluations_leased(bus: Bus) -> int:
    found = await bus.api(f"CONSUMER.INFO.{names.stream(bus.run, 'episodes')}.episodes_eval")
    return int(found["num_ack_pending"])


async def test_slow_rewards_of_evaluations_hold_up_no_training(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """The room for evaluations is full of executions whose set's own hook does not return; training goes on beside them."""
    os.mkfifo(tmp_path / "told")
    told = os.open(tmp_path / "told", os.O_RDWR)  # both ends: nobody waits for the other
    slow = {"hook": f"{HOOKS}:once_told", "args": {"folder": str(tmp_path)}}
    sets = {"sets": {"slow": {"hook": "physarum.agents.calculator.environment:problems", "reward": slow}}}
    context = reward_context(tmp_path, bus, publisher, f"evaluation={json.dumps(sets)}", "reward.concurrency=2")
    for number in range(8):
        one = execution(bus.run, f"eval-{number}", f"eval {number}", evaluation=True)
        one.task.source = "eval/1/x/slow"
        await publish_execution(context, "episodes", one)
    try:
        async with running(RewardActor(context)):
            async with asyncio.timeout(DEADLINE_S):
                while (await evaluations_leased(bus)) < 4:  # as many as fill the room beside one process
                    await asyncio.sleep(0.01)
            for number in range(8):
                await publish_execution(context, "episodes", execution(bus.run, f"train-{number}", "one"))
            await read(bus, "samples", 8)
            assert (await log.state(bus, "evals")).messages == 0
            os.write(told, b"x" * 8)
            await read(bus, "evals", 8)
    finally:
        os.close(told)
    await nothing_left(bus)


@pytest.mark.parametrize("listed", [True, False])
async def test_a_kernel_that_lists_no_children_is_named_once(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    listed: bool,
) -> None:  # fmt: skip
    """The limits of a hook's children hold nothing there, and nobody would know."""
    monkeypatch.setattr("physarum.actors.reward.actor.lists_children", lambda: listed)
    actor = RewardActor(reward_context(tmp_path, bus, publisher, "reward.workers=2"))
    async with running(actor):
        await eventually(lambda: actor.state == "ready")
    assert caplog.text.count("this kernel lists no children") == (not listed)


def test_whether_children_are_listed_is_read_where_they_would_be(tmp_path: Path) -> None:
    own = tmp_path / str(os.getpid()) / "task" / str(os.getpid())
    own.mkdir(parents=True)
    assert not lists_children(tmp_path)
    (own / "children").write_text("")
    assert lists_children(tmp_path)


@pytest.mark.parametrize("inline_limit_bytes", [262144, 1024], ids=["inline", "by reference"])
async def test_scores_too_large_for_a_header_travel_in_the_body(
    tmp_path: Path, bus: Bus, publisher: Publisher, inline_limit_bytes: int
) -> None:
    """A thousand parts are 20 kB of JSON for each of four samples; NATS refuses headers above 64 KiB."""
    context = reward_context(tmp_path, bus, publisher, f"bus.inline_limit_bytes={inline_limit_bytes}")
    await publish_execution(context, "episodes", execution(bus.run, "a", "many-parts", samples=4))
    await publish_execution(context, "episodes", execution(bus.run, "b", "one"))
    async with running(RewardActor(context)):
        found = await scored(context, 2)
    for sample in found["many-parts"].samples:
        assert sample.reward == 500.0
        assert (len(sample.reward_parts), sample.reward_parts["größe 0999"]) == (1000, 0.5)
    assert found["one"].samples[0].reward == 1.0
    for entry in await read(bus, "samples", 2):
        header = read_header(entry.headers)
        body = await read_body(context, entry.headers, entry.data)
        assert header.digest == digest(body)
        assert (SCORES_HEADER in entry.headers) == (header.group == "main/0/b")
        assert (entry.data == b"") == (inline_limit_bytes == 1024 and header.group == "main/0/a")
    await nothing_left(bus)


async def test_what_no_planner_could_read_is_buried_with_its_reason_and_the_actor_goes_on(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """520 samples fit into 60 KiB of header until each has a reward of many digits."""
    context = reward_context(tmp_path, bus, publisher)
    made = execution(bus.run, "a", "long", samples=SAMPLES_NEAR_THE_LIMIT)
    await publish_execution(context, "episodes", made)
    await publish_execution(context, "episodes", execution(bus.run, "b", "one"))
    async with running(RewardActor(context)):
        (letter,) = [decode(entry.data, DeadLetter) for entry in await read(bus, "dead", 1)]
        assert list(await scored(context, 1)) == ["one"]
    assert f"of {SAMPLES_NEAR_THE_LIMIT} samples with 0 spans needs a header of" in letter.reason
    assert "expected at most 61440. Let an episode return fewer samples" in letter.reason
    await nothing_left(bus)


@pytest.mark.parametrize("error", [BlobRefusedError("wrong token"), BlobUnreachableError("away"), OSError(5, "EIO")])
async def test_a_body_that_cannot_be_read_now_is_tried_again(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    context = reward_context(tmp_path, bus, publisher, "bus.inline_limit_bytes=64")
    await publish_execution(context, "episodes", execution(bus.run, "a", "one"))
    real, faults = context.blobs.get, [error]

    async def get(ref: BlobRef) -> bytes:
        if faults:
            raise faults.pop()
        return await real(ref)

    monkeypatch.setattr(context.blobs, "get", get)
    actor = RewardActor(context)
    async with running(actor):
        assert list(await scored(context, 1)) == ["one"]
    assert actor.numbers["failed"] == 1
    await nothing_left(bus)


async def test_every_failure_is_retried_then_dead_with_its_reason_and_the_actor_goes_on(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = reward_context(tmp_path, bus, publisher, "reward.timeout_s=0.5", f"reward.args.folder={tmp_path}")
    failures = {
        "raise": r"the reward hook raised ValueError: no such answer (",
        "sys-exit": "the reward hook raised SystemExit: leaving",
        "exit": "the reward hook's process exited with status 3 during the call",
        "hang": "the reward hook did not return within reward.timeout_s = 0.5 s",
        "nan": "the reward hook returned a value that is nan",
        "text": "the reward hook returned a value of type str",
        "none": "the reward hook returned a value of type NoneType",
        "object": "the reward hook returned <object object",
        "empty": "the reward hook returned an empty mapping",
        "short": "a list of 1 entries for an execution of 2 samples",
        "huge": "the reward hook returned 12089",
    }
    for name in failures:
        await publish_execution(context, "episodes", execution(bus.run, name, name, samples=2))
    for number in range(20):
        await publish_execution(context, "episodes", execution(bus.run, str(number), "one"))
    actor = RewardActor(context)
    async with running(actor):
        letters = [decode(entry.data, DeadLetter) for entry in await read(bus, "dead", len(failures))]
        assert len(await read(bus, "samples", 20)) == 20
        child = int((tmp_path / "child").read_text())
    reasons = {decode(letter.body, Execution).task.prompt: letter.reason for letter in letters}
    assert set(reasons) == set(failures)
    for name, words in failures.items():
        assert words in reasons[name], reasons[name]
    assert "reward_hooks.py:22)" in reasons["raise"]
    assert {letter.deliveries for letter in letters} == {2}
    assert actor.numbers == {"scored": 20, "failed": 2 * len(failures), "timeouts": 2}
    assert not alive(child), "what the hook started must die with it"
    await nothing_left(bus)


async def test_a_call_behind_a_hanging_one_is_not_charged_for_it(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = reward_context(
        tmp_path, bus, publisher, "bus.max_deliver=1", "reward.timeout_s=0.5", f"reward.args.folder={tmp_path}"
    )
    for number in range(10):  # fast calls first, so that more are sent ahead
        await publish_execution(context, "episodes", execution(bus.run, f"a{number}", "one"))
    actor = RewardActor(context)
    async with running(actor):
        await read(bus, "samples", 10)
        for number in range(40):
            prompt = "hang" if number == 5 else "one"
            await publish_execution(context, "episodes", execution(bus.run, f"b{number}", prompt))
        assert len(await read(bus, "samples", 49)) == 49
        (letter,) = [decode(entry.data, DeadLetter) for entry in await read(bus, "dead", 1)]
    assert "did not return within" in letter.reason
    assert actor.numbers["failed"] == 1


async def test_async_hooks_keep_one_event_loop(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = reward_context(tmp_path, bus, publisher, hook="slowly")
    for number in range(5):
        await publish_execution(context, "episodes", execution(bus.run, str(number), str(number)))
    async with running(RewardActor(context)):
        found = await scored(context, 5)
    assert {one.samples[0].reward for one in found.values()} == {0.25}


async def test_without_a_hook_executions_pass_through_unscored(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = make_context(tmp_path, bus, publisher, "reward", "reward.hook=null", "trainer.objective=sft")
    for number in range(5):
        await publish_execution(context, "episodes", execution(bus.run, str(number), str(number)))
    before = {child.pid for child in psutil.Process().children()}
    async with running(RewardActor(context)):
        found = await scored(context, 5)
        assert {child.pid for child in psutil.Process().children()} == before
    assert {one.samples[0].reward for one in found.values()} == {None}


async def test_an_unreadable_execution_is_buried_at_once(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = reward_context(tmp_path, bus, publisher)
    await publisher.publish(f"ph.{bus.run}.episodes.train.x", b"\xc1 altered", message_id="episodes/x")
    async with running(RewardActor(context)):
        (letter,) = [decode(entry.data, DeadLetter) for entry in await read(bus, "dead", 1)]
    assert letter.reason.startswith("unreadable execution: ")
    assert letter.deliveries == 1


async def test_a_hook_that_does_not_import_is_refused_at_start(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = reward_context(tmp_path, bus, publisher, hook="by_promt")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await RewardActor(context).run()
    assert caught.group_contains(UnrecoverableError, match="did you mean `by_prompt`")


async def test_hook_processes_end_with_the_actor(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = reward_context(tmp_path, bus, publisher, "reward.workers=2", hook="pid")
    await publish_execution(context, "episodes", execution(bus.run, "a", "a"))
    async with running(RewardActor(context)):
        found = await scored(context, 1)
        process = psutil.Process(int(found["a"].samples[0].reward or 0))
        assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert not process.is_running()


async def test_a_killed_actor_leaves_no_process_and_its_executions_are_scored_once(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """SIGKILL in the middle of calls; the next actor gets the leases back after ack_wait."""
    context = reward_context(tmp_path, bus, publisher, f"reward.args.folder={tmp_path}", "reward.workers=2")
    await publish_execution(context, "episodes", execution(bus.run, "hang", "hang"))
    for number in range(60):
        await publish_execution(context, "episodes", execution(bus.run, str(number), "one"))
    with actor_process(context) as first:
        await read(bus, "samples", 60)
        hooks = psutil.Process(first.process.pid).children(recursive=True)
        assert len(hooks) == 5, "two hook processes with their keepers, and what the hanging one has started"
        first.kill()
    assert await asyncio.to_thread(ended, hooks)
    again = reward_context(tmp_path, bus, publisher, "reward.timeout_s=0.5", f"reward.args.folder={tmp_path}")
    with actor_process(again) as second:
        assert len(await read(bus, "samples", 60)) == 60
        (letter,) = [decode(entry.data, DeadLetter) for entry in await read(bus, "dead", 1)]
        assert await asyncio.to_thread(second.drain) == 0, second.log.read_text()
    assert "did not return" in letter.reason
    samples = await read(bus, "samples", 60)
    assert (
        len({(await read_execution(context, entry.headers, entry.data)).id for entry in samples}) == len(samples) == 60
    )


async def test_a_killed_server_loses_no_execution(tmp_path: Path, own_server: OwnServer, own_bus: Bus) -> None:
    publisher = await Publisher(own_bus).start()
    context = reward_context(tmp_path, own_bus, publisher)
    for number in range(300):
        await publish_execution(context, "episodes", execution(own_bus.run, str(number), "one"))
    async with running(RewardActor(context)):
        await read(own_bus, "samples", 50)
        await asyncio.to_thread(own_server.kill)
        await own_server.start()
        assert len(await read(own_bus, "samples", 300)) == 300
