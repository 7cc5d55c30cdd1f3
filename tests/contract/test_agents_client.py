"""The engine client against a server that speaks SGLang's /generate: every way in which a request can go wrong."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.agents.client import EngineClient
from physarum.agents.connections import open_session
from physarum.agents.errors import (
    EngineRefusedError,
    EngineReplyError,
    EngineUnavailableError,
    NoEngineError,
    OffPinError,
    SamplingError,
)
from physarum.agents.fleet.choice import Wanted
from physarum.agents.protocols import Client
from physarum.agents.retries import RetryPolicy
from physarum.agents.routing import EngineRef
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Task
from physarum.bus.version import Span

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
FAST = RetryPolicy(attempts=4, base_s=0.001, max_s=0.002, deadline_s=10.0, request_timeout_s=5.0)


def says(ids: list[int], finish: str = "stop", version: str = "p@0.1", **meta: Any) -> Answer:
    """An answer with these tokens, each with log-probability -token/8 (exact in float32)."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        defaults = {
            "id": body["rid"],
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 2,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-token / 8, token, None] for token in ids],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": {**defaults, **meta}})

    return answer


def status(code: int, text: str = "why") -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=code, text=text)

    return answer


async def drops(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """The connection breaks in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"output_ids": [1')
    assert request.transport is not None
    request.transport.abort()
    return response


async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("cancelled before")


class Fake:
    """An engine that gives the scripted answers in turn, and the router that leads to it."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.picked = 0
        self.released = 0
        self.failures: list[Exception] = []
        self.numbers: list[int | None] = []
        self.wanted: list[Wanted] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        return await self.answers[min(len(self.bodies), len(self.answers)) - 1](request, body)

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        self.picked += 1
        self.numbers.append(wanted.number)
        self.wanted.append(wanted)
        return EngineRef(self.url, "e0", "p@0.9")

    def release(self, ref: EngineRef) -> None:
        self.released += 1

    def served(self, ref: EngineRef, made: int) -> None:
        assert self.released < self.picked, "served comes before release"

    def failed(self, ref: EngineRef, error: Exception) -> None:
        assert self.released < self.picked, "failed comes before release"
        self.failures.append(error)


@asynccontextmanager
async def engine(
    *answers: Answer, retry: RetryPolicy = FAST, **options: Any
) -> AsyncIterator[tuple[Fake, EngineClient]]:
    fake = Fake(list(answers))
    app = web.Application()
    app.router.add_post("/generate", fake.handle)
    server = TestServer(app)
    async with server, open_session() as session:  # TestServer ends a request whose connection closed, as SGLang does
        fake.url = str(server.make_url("/"))
        client = EngineClient(
            session, fake, FolderTokenizer(Path("unused")), retry=retry, rng=random.Random(0), **options
        )
        yield fake, client
        assert fake.released == fake.picked, "every engine picked is released"


async def test_sampling_that_cannot_be_sent_keeps_no_place_on_an_engine() -> None:
    """Each such request left the engine one place poorer, for ever; `engine` looks at what is released."""
    async with engine(says([5])) as (fake, client):
        with pytest.raises(SamplingError, match="expected text, numbers, lists, and objects with text as keys"):
            await client.generate([1], {"logit_bias": {5: 1.0}}, max_new_tokens=4)
    assert (fake.picked, fake.bodies) == (1, [])


async def test_a_plain_generation() -> None:
    async with engine(says([4, 8])) as (fake, client):
        generation = await client.generate([1, 2, 3], {"temperature": 0.5}, max_new_tokens=7)
    (body,) = fake.bodies
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 7}
    assert body["return_logprob"] is True
    assert "extra_key" not in body
    assert generation.token_ids.tolist() == [4, 8]
    assert generation.logprobs.tolist() == [-0.5, -1.0]
    assert generation.spans == [Span("p@0.1", 0, 2)]
    assert (generation.finish_reason, generation.cached_tokens, generation.prompt_tokens) == ("stop", 2, 3)
    assert generation.rid == body["rid"]
    assert generation.started_at <= generation.finished_at
    assert [end > start for start, end in client.meter.pop()] == [True]


async def test_a_tasks_sampling_is_laid_over_the_clients_and_under_the_calls() -> None:
    task = Task(
        id="s/0/0/0",
        run="t",
        source="s",
        ordinal=0,
        group="g",
        group_size=1,
        member=0,
        sampling={"top_p": 0.5, "top_k": 3},
    )
    async with engine(says([4]), sampling={"temperature": 1.0, "top_p": 1.0}) as (fake, client):
        view: Client = client.for_task(task)
        await view.generate([1], {"top_k": 7})
        assert client.sampling == {"temperature": 1.0, "top_p": 1.0}
    assert fake.bodies[0]["sampling_params"] == {"temperature": 1.0, "top_p": 0.5, "top_k": 7, "max_new_tokens": 256}
    assert fake.bodies[0]["rid"].startswith("s/0/0/0:")


async def test_the_prefix_cache_is_kept_apart_per_version_when_asked() -> None:
    async with engine(says([4]), cache_per_version=True) as (fake, client):
        await client.generate([1])
    assert fake.bodies[0]["extra_key"] == "p@0.9"


@pytest.mark.parametrize("code", [400, 403, 404, 422, 307])
async def test_a_refusal_is_never_retried(code: int) -> None:
    async with engine(status(code, "input is longer than the context")) as (fake, client):
        with pytest.raises(EngineRefusedError, match=f"HTTP {code}: input is longer than the context") as caught:
            await client.generate([1])
    assert (caught.value.status, len(fake.bodies)) == (code, 1)
    assert fake.failures == [caught.value], "which the router takes for an answer"


async def test_what_may_pass_is_retried_with_a_fresh_request_id() -> None:
    async with engine(status(500), status(503), drops, says([4])) as (fake, client):
        generation = await client.generate([1])
    assert generation.token_ids.tolist() == [4]
    assert len({body["rid"] for body in fake.bodies}) == 4
    assert len(fake.failures) == 3
    assert client.retried == {"EngineFailedError": 2, "ClientPayloadError": 1}


async def test_attempts_are_bounded_and_the_last_failure_is_named() -> None:
    async with engine(status(503, "loading")) as (fake, client):
        with pytest.raises(EngineUnavailableError, match=r"4 of 4 attempts failed .* HTTP 503: loading") as caught:
            await client.generate([1])
    assert len(fake.bodies) == 4
    assert caught.value.partial is None


async def test_an_engine_that_is_gone_is_retried_until_the_attempts_end() -> None:
    async with engine(says([4])) as (fake, client):
        fake.url = "http://127.0.0.1:9"  # discard port: nobody listens
        with pytest.raises(EngineUnavailableError, match="ClientConnectorError"):
            await client.generate([1])
    assert len(fake.failures) == 4


async def test_a_hanging_request_times_out_and_another_is_sent() -> None:
    retry = RetryPolicy(attempts=4, base_s=0.001, deadline_s=10.0, request_timeout_s=0.2)
    async with engine(hangs, says([4]), retry=retry) as (fake, client):
        generation = await client.generate([1])
    assert generation.token_ids.tolist() == [4]
    assert [isinstance(error, TimeoutError) for error in fake.failures] == [True]


async def test_the_deadline_bounds_everything() -> None:
    retry = RetryPolicy(attempts=1000, base_s=0.001, deadline_s=0.3, request_timeout_s=5.0)
    async with engine(hangs, retry=retry) as (_, client):
        async with asyncio.timeout(5):
            with pytest.raises(EngineUnavailableError, match=r"deadline of 0\.3 s"):
                await client.generate([1])


async def test_no_engine_within_the_deadline_is_named() -> None:
    class Nobody(Fake):
        async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
            raise NoEngineError(f"none of group policy within {deadline_s:.0f} s")

    async with open_session() as session:
        client = EngineClient(session, Nobody([]), FolderTokenizer(Path("unused")), retry=FAST)
        with pytest.raises(EngineUnavailableError, match="no engine was free: none of group policy within 10 s"):
            await client.generate([1])


async def test_a_router_that_never_answers_does_not_hang_the_episode() -> None:
    class Silent(Fake):
        async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
            await asyncio.Event().wait()
            raise AssertionError("cancelled before")

    async with open_session() as session:
        retry = RetryPolicy(deadline_s=0.1, room_s=0.1)
        client = EngineClient(session, Silent([]), FolderTokenizer(Path("unused")), retry=retry)
        with pytest.raises(EngineUnavailableError, match="no engine was free"):
            await client.generate([1])


async def test_an_abort_is_continued_behind_the_tokens_held() -> None:
    answers = (says([4, 8], "abort"), says([], "abort", "p@0.2"), says([16], "length", "p@0.2"))
    async with engine(*answers) as (fake, client):
        generation = await client.generate([1], {"max_new_tokens": 3, "min_new_tokens": 1})
    assert [body["input_ids"] for body in fake.bodies] == [[1], [1, 4, 8], [1, 4, 8]]
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [3, 1, 1]
    assert [body["sampling_params"]["min_new_tokens"] for body in fake.bodies] == [1, 0, 0]
    assert generation.token_ids.tolist() == [4, 8, 16]
    assert generation.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert generation.spans == [Span("p@0.1", 0, 2), Span("p@0.2", 2, 3)]
    assert (generation.finish_reason, generation.prompt_tokens) == ("length", 1)
    assert (client.retried, fake.failures) == ({"abort": 2}, [])


async def test_an_abort_behind_the_last_token_of_the_budget_is_a_length_stop() -> None:
    async with engine(says([4, 8], "abort")) as (fake, client):
        generation = await client.generate([1], max_new_tokens=2)
    assert (generation.finish_reason, len(fake.bodies)) == ("length", 1)


async def test_aborts_without_progress_are_bounded_and_keep_the_tokens_held() -> None:
    async with engine(says([4, 8], "abort"), says([], "abort")) as (fake, client):
        with pytest.raises(EngineUnavailableError, match="2 tokens held") as caught:
            await client.generate([1])
    assert len(fake.bodies) == 5  # one with progress, then four attempts
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids.tolist() == [4, 8]
    assert caught.value.partial.finish_reason == "abort"


async def test_many_aborts_with_progress_are_not_failures() -> None:
    async with engine(*[says([token], "abort") for token in range(1, 21)], says([99])) as (_, client):
        generation = await client.generate([1])
    assert generation.token_ids.tolist() == [*range(1, 21), 99]


async def test_penalties_and_grammars_start_again_instead_of_being_continued_wrongly() -> None:
    async with engine(says([4, 8], "abort"), says([16])) as (fake, client):
        generation = await client.generate([1], {"repetition_penalty": 1.1, "frequency_penalty": 0.0})
    assert fake.bodies[1]["input_ids"] == [1]
    assert generation.token_ids.tolist() == [16]


async def test_aborted_tokens_are_returned_as_they_are_when_asked() -> None:
    async with engine(says([4, 8], "abort"), resume_aborted=False) as (fake, client):
        generation = await client.generate([1])
    assert (generation.finish_reason, generation.token_ids.tolist(), len(fake.bodies)) == ("abort", [4, 8], 1)


async def test_spans_of_a_request_that_lived_through_an_update() -> None:
    versions = [{"version": "p@0.1", "start": 0, "end": 1}, {"version": "p@0.2", "start": 1, "end": 3}]
    async with engine(says([4, 8, 16], version="p@0.2", weight_versions=versions)) as (_, client):
        generation = await client.generate([1])
    assert generation.spans == [Span("p@0.1", 0, 1), Span("p@0.2", 1, 3)]


async def test_an_engine_that_reports_one_version_gets_the_oldest_that_was_live() -> None:
    seen: list[tuple[str, str, bool]] = []

    def oldest(ref: EngineRef, label: str, submitted_at: float, answered_at: float) -> str:
        seen.append((ref.instance, label, submitted_at <= answered_at))
        return "p@0.1"

    async with engine(says([4, 8], version="p@0.2", weight_versions=None), oldest_version=oldest) as (_, client):
        generation = await client.generate([1])
    assert generation.spans == [Span("p@0.1", 0, 2)]
    assert seen == [("e0", "p@0.2", True)]


async def test_a_flawed_reply_is_kept_but_named_counted_and_not_trainable() -> None:
    async with engine(says([4, 8], output_token_logprobs=[[-0.5, 4, None]])) as (_, client):
        generation = await client.generate([1])
    assert generation.token_ids.tolist() == [4, 8]
    assert np.isnan(generation.logprobs).all()
    assert generation.flaws == ("logprobs_count",)
    assert client.flaws == {"logprobs_count": 1}


async def test_a_server_that_is_no_engine_is_refused_by_name() -> None:
    async with engine(status(200, "<html>hello</html>")) as (fake, client):
        with pytest.raises(EngineReplyError, match="is not a reply of /generate"):
            await client.generate([1])
    assert len(fake.bodies) == 1
    assert [type(error) for error in fake.failures] == [EngineReplyError], "a breaker hears of it"


@pytest.mark.parametrize(
    ("sampling", "message"), [({"max_new_tokens": 0}, "at least 1"), ({"n": 4}, "once per sample")]
)
async def test_impossible_sampling_is_refused_before_anything_is_sent(sampling: dict[str, Any], message: str) -> None:
    async with engine(says([4])) as (fake, client):
        with pytest.raises(SamplingError, match=message):
            await client.generate([1], sampling)
    assert fake.picked == 0


async def test_a_cancelled_episode_closes_its_request_and_releases_the_engine() -> None:
    closed, arrived = asyncio.Event(), asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        try:
            return await hangs(request, body)
        finally:
            closed.set()

    async with engine(waits) as (fake, client):
        episode = asyncio.create_task(client.generate([1]))
        await asyncio.wait_for(arrived.wait(), 5)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert (fake.picked, fake.released, fake.failures, client.meter.in_flight) == (1, 1, [], 0)
        await asyncio.wait_for(closed.wait(), 5)


async def test_concurrent_requests_make_one_busy_interval() -> None:
    gate, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def gated(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        waiting.release()
        await gate.wait()
        return await says([4])(request, body)

    async with engine(gated) as (_, client):
        running = [asyncio.create_task(client.generate([1])) for _ in range(20)]
        for _ in running:
            await asyncio.wait_for(waiting.acquire(), 5)
        assert client.meter.in_flight == 20
        gate.set()
        await asyncio.gather(*running)
        assert len(client.meter.pop()) == 1


async def test_a_pinned_task_gets_tokens_of_its_weights_alone() -> None:
    """Tokens of other weights (the engine was updated meanwhile) are thrown away; the epoch does not matter."""
    task = Task(id="s/0/0/0", run="t", source="s", ordinal=0, group="g", group_size=1, member=0, pin=7)
    async with engine(says([4], version="p@1.6"), says([5], version="p@2.7")) as (fake, client):
        generation = await client.for_task(task).generate([1])
    assert generation.token_ids.tolist() == [5]
    assert generation.spans == [Span("p@2.7", 0, 1)]
    assert [type(error) for error in fake.failures] == [OffPinError]
    assert fake.numbers == [7, 7]


def plain_task(**changes: Any) -> Task:
    return Task(id="s/0/0/0", run="t", source="s", ordinal=0, group="g", group_size=1, member=0, **changes)


async def test_what_a_router_is_told_of_a_request() -> None:
    """The session's engine, whether it goes on behind tokens held, its weights, its prompt and what remains of the answer."""
    async with engine(says([4], "abort"), says([8]), says([16])) as (fake, client):
        episode = client.for_task(plain_task())
        await episode.generate([1, 2], max_new_tokens=5)
        await episode.at_least(3).generate([1, 2, 4, 8])
        await client.for_task(plain_task()).generate([1])
    told = [(one.prefers, one.resumes, one.minimum, len(one.tokens)) for one in fake.wanted]
    assert told == [("", False, None, 2), ("e0", True, None, 3), ("e0", False, 3, 4), ("", False, None, 1)]
    assert [one.max_new_tokens for one in fake.wanted[:2]] == [5, 4]


async def test_an_episode_ends_in_order_when_its_tokens_are_spent() -> None:
    async with engine(says([4, 8], "length"), says([5, 6, 7]), episode_tokens=5) as (fake, client):
        episode = client.for_task(plain_task())
        first, second, third = [await episode.generate([1], max_new_tokens=4) for _ in range(3)]
        await client.for_task(plain_task()).generate([1], max_new_tokens=4)
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.bodies] == [4, 3, 4], "each episode has its own"
    assert (len(first.token_ids), len(second.token_ids), len(third.token_ids)) == (2, 3, 0)
    assert third.finish_reason == "length" and third.spans == []


async def test_waiting_for_room_is_not_charged_to_the_request() -> None:
    class Busy(Fake):
        async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
            await asyncio.sleep(0.3)
            return await super().pick(deadline_s, wanted)

    fake, retry = Busy([says([4])]), RetryPolicy(deadline_s=0.2, request_timeout_s=5.0)
    app = web.Application()
    app.router.add_post("/generate", fake.handle)
    async with TestServer(app) as server, open_session() as session:
        fake.url = str(server.make_url("/"))
        client = EngineClient(session, fake, FolderTokenizer(Path("unused")), retry=retry)
        began, sent = time.monotonic(), []
        client.on_sent = lambda: sent.append(time.monotonic() - began)
        async with client.clock.limit(0.25):
            assert (await client.generate([1])).token_ids.tolist() == [4]
    assert len(sent) == 1 and sent[0] >= 0.3, "a request has no age before it goes out"


async def test_through_a_router_the_session_is_named_and_no_version() -> None:
    """Which engine answers is not known, so no version's prefixes may be named."""

    class Front(Fake):
        async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
            return EngineRef((await super().pick(deadline_s, wanted)).url, "e0", "p@0.9", through=True)

    keys: list[str | None] = []

    async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        keys.append(request.headers.get("X-SMG-Routing-Key"))
        return await says([4])(request, body)

    fake = Front([answers])
    app = web.Application()
    app.router.add_post("/generate", fake.handle)
    async with TestServer(app) as server, open_session() as session:
        fake.url = str(server.make_url("/"))
        client = EngineClient(session, fake, FolderTokenizer(Path("unused")), cache_per_version=True)
        episode = client.for_task(plain_task())
        await episode.generate([1])
        await episode.generate([1, 4, 5])
    assert keys == ["s/0/0/0:", "s/0/0/0:"]
    assert all("extra_key" not in body for body in fake.bodies)


def told(client: EngineClient) -> dict[str, tuple[int, int, int]]:
    return {kind: (one.times, one.interrupted, one.replayed) for kind, one in client.replay.pop().items()}


async def test_what_an_abort_costs_is_what_the_engine_no_longer_had() -> None:
    """Three tokens of context are gone on with; all but the last one were still cached."""
    async with engine(says([4, 8], "abort"), says([], "abort"), says([16], "length", cached_tokens=2)) as (_, client):
        await client.generate([1], max_new_tokens=3)
        assert told(client) == {"aborted": (1, 3, 1)}
        assert told(client) == {}


async def test_what_a_drain_costs_is_the_whole_context() -> None:
    class Another(Fake):
        async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
            return EngineRef((await super().pick(deadline_s, wanted)).url, f"e{self.picked}", "p@0.9")

    fake = Another([says([4, 8], "abort"), says([16], "length", cached_tokens=0)])
    app = web.Application()
    app.router.add_post("/generate", fake.handle)
    async with TestServer(app) as server, open_session() as session:
        fake.url = str(server.make_url("/"))
        client = EngineClient(session, fake, FolderTokenizer(Path("unused")))
        await client.generate([1], max_new_tokens=3)
    assert told(client) == {"moved": (1, 3, 3)}


async def test_a_broken_answer_costs_the_prompt_and_a_refused_connection_nothing() -> None:
    async with engine(drops, says([4], cached_tokens=0)) as (fake, client):
        await client.generate([1, 2])
        assert told(client) == {"lost": (1, 2, 2)}
        fake.url = "http://127.0.0.1:9"
        with pytest.raises(EngineUnavailableError):
            await client.generate([1])
        assert told(client) == {}


async def test_another_workers_tokens_are_prefilled_again() -> None:
    async with engine(says([4, 8], "abort"), resume_aborted=False) as (_, client):
        first = client.for_task(plain_task())
        await first.generate([1], max_new_tokens=3)
        assert first.journal is not None
        begun = first.journal.begun()
    async with engine(says([16], "length", cached_tokens=0)) as (_, client):
        await client.for_task(plain_task(begun=begun)).generate([1], max_new_tokens=3)
        assert told(client) == {"handed_over": (1, 3, 3)}
