"""What an engine sent before it died is kept, and the request goes on behind it elsewhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from physarum.agents.client import EngineClient
from physarum.agents.connections import open_session
from physarum.agents.errors import EngineRefusedError, EngineReplyError, EngineUnavailableError
from physarum.agents.fleet.choice import Wanted
from physarum.agents.journal import Journal
from physarum.agents.pairs import Prefill
from physarum.agents.replay import Tokens
from physarum.agents.retries import RetryPolicy
from physarum.agents.routing import EngineRef
from physarum.agents.streaming import Received
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Task
from physarum.bus.version import Span, Version, append_span

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

FAST = RetryPolicy(attempts=4, base_s=0.001, max_s=0.002, deadline_s=20.0, request_timeout_s=5.0)
BUDGET = 12
PROMPT = [1, 2, 3]
CHUNK = 3


def following(context: list[int]) -> int:
    """The one token that comes behind `context`."""
    return (sum(context) * 31 + len(context)) % 400 + 2


def answer_to(context: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(following([*context, *made]))
    return made


class Engines:
    """A fleet behind one URL that dies as it is told, and the router to it. A token's log-probability is -token/8.

    `breaks`: for each request, after how many bytes of its answer the connection is cut; then none is. `updates`: before which
    tokens, counted over all requests, the weights change; a request is announced the version of the moment it is sent.
    """

    def __init__(self, breaks: list[int], updates: frozenset[int] = frozenset()) -> None:
        self.breaks, self.updates = breaks, updates
        self.bodies: list[dict[str, Any]] = []
        self.sent: list[list[int]] = []
        """Of each request, the tokens of the chunks that left whole."""
        self.made = 0
        self.version = 1
        self.versions: list[dict[int, int]] = []
        """Of each request, the version of each of its tokens."""
        self.failures: list[Exception] = []
        self.open = 0
        self.url = ""
        self.prefill: Prefill | None = None
        self.hold: asyncio.Event | None = None
        self.pace_s = 0.0
        """Before each chunk."""
        self.cut_off = asyncio.Event()
        self.change: Callable[[list[dict[str, Any]]], None] = lambda chunks: None

    @property
    def label(self) -> str:
        return f"p@0.{self.version}"

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        self.open += 1
        return EngineRef(self.url, f"e{len(self.bodies)}", self.label, prefill=self.prefill)

    def release(self, ref: EngineRef) -> None:
        self.open -= 1

    def served(self, ref: EngineRef, made: int) -> None: ...

    def failed(self, ref: EngineRef, error: Exception) -> None:
        self.failures.append(error)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        chunks = self.chunks(body)
        if not body["stream"]:
            return web.json_response(chunks[-1])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        left = self.breaks.pop(0) if self.breaks else None
        for chunk in chunks:
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            event = b"data: " + orjson.dumps(chunk) + b"\n\n"
            await response.write(event[:left])
            left = None if left is None else left - len(event)
            if left is not None and left < 0:
                return await self._break(request, response)
            self.sent[-1] += chunk["output_ids"]
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        if self.hold is not None:
            try:
                await self.hold.wait()
            finally:
                self.cut_off.set()
        assert request.transport is not None
        request.transport.close()
        return response

    def chunks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The first of one token, the others of as many as were asked for; all at once where nothing is streamed."""
        prompt, budget = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        size = body["sampling_params"].get("stream_interval", budget)
        tokens = answer_to(prompt, budget)
        spans: list[Span] = []
        self.sent.append([])
        self.versions.append({})
        chunks: list[dict[str, Any]] = []
        for place in range(budget):
            if self.made in self.updates:
                self.version += 1
            self.made += 1
            append_span(spans, self.label, 1)
            self.versions[-1][len(prompt) + place] = self.version
            begin = chunks[-1]["meta_info"]["completion_tokens"] if chunks else 0
            if place + 1 - begin < (size if chunks or not body["stream"] else 1) and place + 1 < budget:
                continue
            ended = place + 1 == budget
            meta = {
                "finish_reason": {"type": "length"} if ended else None,
                "prompt_tokens": len(prompt),
                "completion_tokens": place + 1,
                "cached_tokens": 1,
                "num_retractions": 0,
                "weight_version": self.label,
                "output_token_logprobs": [[-one / 8, one, None] for one in tokens[begin : place + 1]],
            }
            said = {**meta, "weight_versions": [msgspec.structs.asdict(one) for one in spans]} if ended else meta
            chunks.append({"text": "", "output_ids": tokens[begin : place + 1], "meta_info": said})
        self.change(chunks)
        return chunks


@asynccontextmanager
async def engines(
    *breaks: int, updates: frozenset[int] = frozenset(), retry: RetryPolicy = FAST, **options: Any
) -> AsyncIterator[tuple[Engines, EngineClient]]:
    fleet = Engines(list(breaks), updates)
    app = web.Application()
    app.router.add_post("/generate", fleet.handle)
    server = TestServer(app)
    async with server, open_session() as session:
        fleet.url = str(server.make_url("/"))
        settings = {"stream_tokens": CHUNK, "rng": random.Random(0), "sampling": {"max_new_tokens": BUDGET}, **options}
        yield fleet, EngineClient(session, fleet, FolderTokenizer(Path("unused")), retry=retry, **settings)
        assert fleet.open == 0, "every engine picked is released"


def task(**fields: Any) -> Task:
    return Task(id="s/0", run="t", source="s", ordinal=0, group="g", group_size=1, member=0, sampling={}, **fields)


async def test_a_long_answer_that_keeps_coming_is_not_taken_for_a_silent_engine() -> None:
    """request_timeout_s is of one silence; it was of the whole answer: long ones were cut off and sent for again."""
    patient = RetryPolicy(attempts=4, base_s=0.001, max_s=0.002, deadline_s=20.0, request_timeout_s=1.0)
    async with engines(retry=patient, stream_tokens=1) as (fleet, client):
        fleet.pace_s = 1.5 / BUDGET
        made = await client.generate(PROMPT)
    assert made.token_ids.tolist() == answer_to(PROMPT, BUDGET)
    assert len(fleet.bodies) == 1 and not client.retried


async def test_a_streamed_answer_is_the_same_as_one_in_one_piece() -> None:
    async with engines() as (_, client):
        streamed = await client.generate(PROMPT)
    async with engines(stream_tokens=None) as (fleet, client):
        whole = await client.generate(PROMPT)
    assert fleet.bodies[0]["stream"] is False
    assert streamed.token_ids.tolist() == whole.token_ids.tolist() == answer_to(PROMPT, BUDGET)
    assert streamed.logprobs.tolist() == whole.logprobs.tolist()
    assert (streamed.spans, streamed.finish_reason, streamed.conservative) == (whole.spans, "length", False)


@pytest.mark.parametrize("seed", range(12))
async def test_wherever_engines_die_no_received_token_is_lost_or_comes_twice_and_spans_hold(seed: int) -> None:
    """Three deaths in a row, at any byte, with weights that change under way."""
    rng = random.Random(seed)
    breaks = [rng.randrange(1, 1500) for _ in range(3)]
    updates = frozenset(rng.sample(range(3 * BUDGET), 4))
    async with engines(*breaks, updates=updates) as (fleet, client):
        made = await client.generate(PROMPT)
    held = list(PROMPT)
    for body, sent in zip(fleet.bodies, fleet.sent, strict=True):
        assert body["input_ids"] == held, "the next request goes on behind all that was received"
        assert body["sampling_params"]["max_new_tokens"] == BUDGET - len(held) + len(PROMPT)
        held += sent
    assert made.token_ids.tolist() == held[len(PROMPT) :] == answer_to(PROMPT, BUDGET)
    assert made.logprobs.tolist() == [-token / 8 for token in made.token_ids]
    truth = [version for _, version in sorted({k: v for one in fleet.versions for k, v in one.items()}.items())]
    spans = [Version.parse(span.version).number for span in made.spans for _ in range(span.start, span.end)]
    assert len(spans) == BUDGET
    assert all(label <= version for label, version in zip(spans, truth, strict=True)), "no token is older than it says"
    assert made.conservative or spans == truth


async def test_a_death_costs_no_token_that_was_sent_and_is_counted_as_an_interruption() -> None:
    async with engines(1300) as (fleet, client):
        made = await client.generate(PROMPT)
    kept = len(fleet.sent[0])
    assert 0 < kept < BUDGET
    assert client.replay.pop() == {"lost": Tokens(1, len(PROMPT) + kept, len(PROMPT) + kept - 1)}
    assert (client.retried, [type(error).__name__ for error in fleet.failures]) == (
        {"ClientPayloadError": 1},
        ["ClientPayloadError"],
    )
    assert made.rid == fleet.bodies[-1]["rid"] != fleet.bodies[0]["rid"]


async def test_an_answer_that_ends_in_order_before_its_last_chunk_is_broken_off() -> None:
    """A proxy that loses its engine may end the answer as if it were whole."""
    async with engines() as (fleet, client):
        fleet.change = lambda chunks: chunks.pop() if len(fleet.bodies) == 1 else None
        made = await client.generate(PROMPT)
    assert made.token_ids.tolist() == answer_to(PROMPT, BUDGET)
    assert client.retried == {"BrokenOffError": 1}


async def test_an_engine_that_falls_silent_is_left_with_what_it_sent() -> None:
    retry = RetryPolicy(attempts=4, base_s=0.001, deadline_s=10.0, request_timeout_s=0.3)
    async with engines(1300, retry=retry) as (fleet, client):
        fleet.hold = asyncio.Event()
        made = await client.generate(PROMPT)
        assert fleet.cut_off.is_set(), "the connection was closed, on which the engine aborts"
    assert made.token_ids.tolist() == answer_to(PROMPT, BUDGET)
    assert len(fleet.bodies[1]["input_ids"]) > len(PROMPT)


async def test_what_was_received_when_a_worker_is_cancelled_goes_with_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    third = asyncio.Event()

    class Noted(Received):
        def take(self, event: bytes) -> None:
            super().take(event)
            if self.count == 1 + 2 * CHUNK:
                third.set()

    monkeypatch.setattr("physarum.agents.client.Received", Noted)
    async with engines(1300) as (fleet, client):
        fleet.hold = asyncio.Event()
        view = client.for_task(task())
        asking = asyncio.create_task(view.generate(PROMPT))
        await third.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await fleet.cut_off.wait()
        assert view.journal is not None and fleet.failures == []
        (begun,) = view.journal.begun()
        assert (begun.token_ids.tolist(), begun.finish_reason) == (fleet.sent[0], "abort")
        resumed = client.for_task(task(begun=[begun]))
        made = await resumed.generate(PROMPT)
    assert made.token_ids.tolist() == answer_to(PROMPT, BUDGET)
    assert fleet.bodies[-1]["input_ids"] == [*PROMPT, *fleet.sent[0]]


async def test_engines_that_die_at_once_for_ever_end_the_request_with_what_there_is() -> None:
    async with engines(1300, *[1] * 50) as (fleet, client):
        with pytest.raises(EngineUnavailableError, match="4 of 4 attempts failed in a row") as caught:
            await client.generate(PROMPT)
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids.tolist() == fleet.sent[0]


async def test_many_deaths_with_progress_are_not_failures() -> None:
    async with engines(*[330] * BUDGET) as (fleet, client):
        made = await client.generate(PROMPT)
    assert made.token_ids.tolist() == answer_to(PROMPT, BUDGET)
    assert len(fleet.failures) > 2 * FAST.attempts and all(fleet.sent)


async def test_a_pinned_task_keeps_only_what_is_certainly_of_its_weights() -> None:
    """The weights change while the engine's second chunk is made; the third leaves under the new label."""
    async with engines(1300, updates=frozenset({2})) as (fleet, client):
        with pytest.raises(EngineUnavailableError, match=r"pinned to number 1") as caught:
            await client.for_task(task(pin=1)).generate(PROMPT)
    assert len(fleet.sent[0]) > 1
    partial = caught.value.partial
    assert partial is not None
    assert (partial.token_ids.tolist(), partial.spans) == (fleet.sent[0][:1], [Span("p@0.1", 0, 1)])
    assert not partial.conservative


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ({"error": {"message": "input is too long", "code": 400}}, EngineRefusedError),
        ({"output_ids": 3}, EngineReplyError),
    ],
)
async def test_an_error_inside_an_answer_is_what_it_were_as_an_answer(last: Any, error: type[Exception]) -> None:
    async with engines() as (fleet, client):
        fleet.change = lambda chunks: chunks.__setitem__(0, {"output_ids": [], "meta_info": None, **last})
        with pytest.raises(error):
            await client.generate(PROMPT)
    assert len(fleet.bodies) == 1


async def test_what_an_engine_could_not_go_on_with_is_not_streamed() -> None:
    async with engines() as (fleet, client):
        await client.generate(PROMPT, {"repetition_penalty": 1.1})
        await client.generate(PROMPT)
    assert [body["stream"] for body in fleet.bodies] == [False, True]


async def test_experts_of_kept_tokens_are_asked_of_whoever_goes_on() -> None:
    """SGLang reports routing with the last chunk alone."""
    from physarum.agents.choices import Capture
    from physarum.agents.session import EngineChoices

    capture = Capture(layers=(0,), total=1, top_k=1, experts=4)
    async with engines(1300, choices=EngineChoices(capture=capture)) as (fleet, client):
        fleet.change = _reports_experts(fleet)
        made = await client.generate(PROMPT)
    assert [body["routed_experts_start_len"] for body in fleet.bodies] == [0, 0]
    assert made.routed_experts is not None
    inputs = [*PROMPT, *made.token_ids.tolist()][:-1]
    assert made.routed_experts[:, 0, 0].tolist() == [token % 4 for token in inputs]


def _reports_experts(fleet: Engines) -> Callable[[list[dict[str, Any]]], None]:
    """Each input's expert is its id modulo 4."""
    import base64

    def change(chunks: list[dict[str, Any]]) -> None:
        body = fleet.bodies[-1]
        made = [token for chunk in chunks for token in chunk["output_ids"]]
        rows = [token % 4 for token in [*body["input_ids"], *made][body["routed_experts_start_len"] : -1]]
        chunks[-1]["meta_info"]["routed_experts"] = base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()

    return change


async def test_a_journal_of_a_task_that_was_never_interrupted_holds_its_generation_once() -> None:
    async with engines() as (_, client):
        view = client.for_task(task())
        view.journal = Journal()
        made = await view.generate(PROMPT)
    (begun,) = view.journal.begun()
    assert begun.token_ids.tolist() == made.token_ids.tolist()
