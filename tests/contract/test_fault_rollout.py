"""One bad episode or engine costs one try of one task: the actor, its slots and everybody else's tasks go on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from aiohttp import web
from aiohttp.test_utils import TestServer
from bus_fixture import DEADLINE_S
from fault_line import HOOKS, context, prepare

from physarum.actors.rollout.actor import RolloutActor
from physarum.actors.wire import publish_task, read_header
from physarum.bus import log
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.names import StreamKey
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task
from physarum.bus.work import DeadLetter

pytestmark = pytest.mark.timeout(60)

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def actor(place: Path, bus: Bus, publisher: Publisher, *overrides: str) -> RolloutActor:
    folder = prepare(place, bus.run, f"rollout.args.folder={place}", *overrides)
    return RolloutActor(context(folder, bus, publisher, "rollout"))


async def issue(made: RolloutActor, prompts: list[str], start: int = 0) -> None:
    for ordinal, prompt in enumerate(prompts, start):
        task = Task(
            id=f"main/0/{ordinal}/0", run=made.bus.run, source="main", ordinal=ordinal, group=f"main/0/{ordinal}",
            group_size=1, member=0, prompt=prompt, sampling={"max_new_tokens": 8},
        )  # fmt: skip
        await publish_task(made.context, task)


async def until(bus: Bus, key: StreamKey, count: int) -> list[log.LogEntry]:
    async with asyncio.timeout(DEADLINE_S):
        while len(found := await log.scan(bus, key)) < count:
            await asyncio.sleep(0.02)
    return found


async def ordinals(bus: Bus, count: int) -> Counter[int]:
    """Of the executions in EPISODES; nothing takes them out here."""
    return Counter(read_header(entry.headers).ordinal for entry in await until(bus, "episodes", count))


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("raise", "the generate hook raised ValueError: no luck"),
        ("cancel", "the generate hook raised OwnCancellationError: CancelledError, and nobody had cancelled it"),
        ("hang", "episode exceeded rollout.episode_timeout_s = 0.3 s"),
        ("timeout", "the generate hook raised TimeoutError: the calculator did not answer"),
        ("text", "the generate hook returned a list of str; expected a list of bus.records.Sample"),
        ("nothing", "holds no sample"),
        ("unsendable", "what the generate hook returned has no wire form"),
        ("countless", "of 600 samples with 0 spans needs a header of"),
    ],
)
async def test_a_bad_episode_ends_in_dead_with_its_reason_and_leaks_no_slot(
    tmp_path: Path, bus: Bus, publisher: Publisher, habit: str, reason: str
) -> None:
    """Three bad tasks on two slots, then good ones: each bad one was tried twice, each good one is done."""
    made = actor(tmp_path, bus, publisher, "rollout.slots=2", "bus.max_deliver=2", "rollout.episode_timeout_s=0.3")
    await issue(made, [habit] * 3 + ["good"] * 4)
    async with running(made):
        assert await ordinals(bus, 4) == Counter([3, 4, 5, 6])
        letters = [decode(entry.data, DeadLetter) for entry in await until(bus, "dead", 3)]
    assert all(reason in letter.reason and letter.deliveries == 2 for letter in letters), letters
    assert (await log.state(bus, "tasks")).messages == 0


async def test_an_execution_that_cannot_be_stored_ends_the_actor_and_is_made_again(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Its task used to stay leased for ever by an actor that looked well."""
    made = actor(tmp_path, bus, publisher, "bus.inline_limit_bytes=64")
    blobs = made.context.folder.path / "blobs"
    blobs.write_text("a file where the folder of the blobs should be")
    await issue(made, ["good"])
    with pytest.raises(ExceptionGroup) as caught:
        async with running(made), asyncio.timeout(DEADLINE_S):
            await asyncio.Event().wait()
    assert caught.group_contains(OSError)
    blobs.unlink()
    async with running(actor(tmp_path, bus, publisher)):
        assert await ordinals(bus, 1) == Counter([0])


class StubEngine:
    """SGLang's /generate as far as an episode needs it. `answer` may be replaced; `requests` counts by task."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.answer: Answer = self.says
        self.label = "policy@1.0"
        self.server: TestServer

    async def says(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        meta = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "weight_version": self.label,
            "weight_versions": [{"version": self.label, "start": 0, "end": 2}],
            "output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]],
        }
        return web.json_response({"text": "", "output_ids": [7, 8], "meta_info": meta})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests[body["rid"].rpartition(":")[0]] += 1
        return await self.answer(request, body)

    @contextlib.asynccontextmanager
    async def serving(self, port: int | None = None) -> AsyncIterator[int]:
        """At `port`, or at one that the system chooses."""
        app = web.Application()
        app.router.add_post("/generate", self.handle)
        async with TestServer(app, port=port) as server:
            self.server = server
            assert server.port is not None
            yield server.port


async def announced(
    bus: Bus, publisher: Publisher, name: str, port: int, sequence: int, state: str = "ready", started_at: float = 1.0
) -> None:
    facts = {"group": "policy", "url": f"http://127.0.0.1:{port}", "version": "policy@1.0"}
    beat = Heartbeat(
        role="engine", instance=name, state=state, pid=1, host="h", started_at=started_at, sequence=sequence, facts=facts
    )  # fmt: skip
    await announce(bus, publisher, beat)


@contextlib.asynccontextmanager
async def beating(bus: Bus, publisher: Publisher, name: str, port: int) -> AsyncIterator[None]:
    """An engine actor that says it is ready, again and again."""

    async def beat() -> None:
        for sequence in itertools.count(1):
            await announced(bus, publisher, name, port, sequence)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


ASKING = [f"rollout.generate={HOOKS}:ask", "engines.policy.count=2"]


async def test_one_engine_timeout_costs_one_request_and_not_its_batch(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """The first request for task 3 is never answered: the other seven finish meanwhile; it is asked again."""
    engine = StubEngine()

    async def hangs_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["input_ids"][2] == 3 and engine.requests["main/0/3/0"] == 1:
            await asyncio.Event().wait()
        return await engine.says(request, body)

    engine.answer = hangs_once
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        made = actor(tmp_path, bus, publisher, *ASKING, "rollout.request_timeout_s=1.0")
        await issue(made, ["ask"] * 8)
        async with running(made):
            assert 3 not in await ordinals(bus, 7)
            assert await ordinals(bus, 8) == Counter(range(8))
    assert engine.requests == Counter({f"main/0/{one}/0": 1 for one in range(8)}) + Counter({"main/0/3/0": 1})


async def test_a_dead_engine_is_left_out_and_rejoins(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """One of two engines stops: nothing fails, the other serves all. Its actor is started anew, and it serves again."""
    first, second = StubEngine(), StubEngine()
    made = actor(tmp_path, bus, publisher, *ASKING, "bus.max_deliver=1")
    async with first.serving() as port, running(made):
        async with second.serving() as again:
            await announced(bus, publisher, "policy-0", port, 1)
            await announced(bus, publisher, "policy-1", again, 1)
            await issue(made, ["ask"] * 20)
            await ordinals(bus, 20)
            assert second.requests.total() > 0
        before = second.requests.total()
        await issue(made, ["ask"] * 20, start=20)
        assert await ordinals(bus, 40) == Counter(range(40))
        assert second.requests.total() == before
        async with second.serving(again):
            await announced(bus, publisher, "policy-1", again, 1, started_at=2.0)
            await issue(made, ["ask"] * 20, start=40)
            assert await ordinals(bus, 60) == Counter(range(60))
            assert second.requests.total() > before
    assert (await log.state(bus, "dead")).messages == 0


async def test_no_engine_at_all_is_named_in_the_dead_letter(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    """All producers of tokens are gone: a named end of each task within its deadline, never a silent wait."""
    made = actor(tmp_path, bus, publisher, *ASKING, "bus.max_deliver=1", "rollout.episode_timeout_s=0.5")
    await issue(made, ["ask"])
    async with running(made):
        (letter,) = [decode(entry.data, DeadLetter) for entry in await until(bus, "dead", 1)]
    assert "no engine of group policy was ready within 0.4" in letter.reason
    assert "(none has announced itself)" in letter.reason


async def test_a_prompt_longer_than_the_context_is_buried_at_its_first_try(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """The engine refuses it each time it is asked: it is asked once, and nobody asks for the task again."""
    engine = StubEngine()

    async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["input_ids"][2] == 1:
            return web.Response(
                status=400, text="The input (9 tokens) is longer than the model's context length (8 tokens)."
            )
        return await engine.says(request, body)

    engine.answer = refuses
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        made = actor(tmp_path, bus, publisher, *ASKING, "bus.max_deliver=3")
        await issue(made, ["ask"] * 3)
        async with running(made):
            assert await ordinals(bus, 2) == Counter([0, 2])
            (letter,) = [decode(entry.data, DeadLetter) for entry in await until(bus, "dead", 1)]
    assert (letter.final, letter.deliveries) == (True, 1)
    assert "HTTP 400: The input (9 tokens) is longer" in letter.reason
    assert engine.requests["main/0/1/0"] == 1


async def test_tokens_without_a_log_probability_each_are_not_trained_and_counted(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """The engine answers one of six requests with fewer log-probabilities than tokens: which are whose cannot be known."""
    engine = StubEngine()

    async def forgets(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["input_ids"] != [1, 2, 1]:
            return await engine.says(request, body)
        meta = {
            "finish_reason": {"type": "stop"}, "prompt_tokens": 3, "cached_tokens": 0, "weight_version": engine.label,
            "weight_versions": [{"version": engine.label, "start": 0, "end": 2}],
            "output_token_logprobs": [[-0.5, 7, None]],
        }  # fmt: skip
        return web.json_response({"text": "", "output_ids": [7, 8], "meta_info": meta})

    engine.answer = forgets
    async with engine.serving() as port, beating(bus, publisher, "policy-0", port):
        made = actor(tmp_path, bus, publisher, f"rollout.generate={HOOKS}:ask_twice", "engines.policy.count=2")
        await issue(made, ["ask"] * 3)
        async with running(made):
            found = [read_header(entry.headers) for entry in await until(bus, "episodes", 3)]
    assert {header.ordinal: header.trainable for header in found} == {0: 4, 1: 2, 2: 4}
    assert made.numbers["flaw_logprobs_count"] == 1
    assert engine.requests["main/0/1/0"] == 2, "and it is not made again"
