"""A service that scores: what is asked again and what never is, how fast, how many at once, and what is remembered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from physarum.agents.rewards import remote
from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import Backend, Pace, Replies, opened
from physarum.agents.rewards.errors import BackendRefusedError, BackendReplyError, BackendUnavailableError
from physarum.agents.rewards.remote import question, score_remote
from physarum.configs.errors import SecretError
from physarum.configs.reward_types import ChatReward, RemoteReward


class Service:
    """Answers with what `replies` makes of the number of the request, and remembers what it was asked."""

    def __init__(self, replies: Callable[[int], web.Response]) -> None:
        self._replies = replies
        self.asked: list[Any] = []
        self.tokens: list[str | None] = []
        self.now = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.tokens.append(request.headers.get("Authorization"))
        number = len(self.asked)
        self.now += 1
        self.most = max(self.most, self.now)
        await self.gate.wait()
        self.now -= 1
        return self._replies(number)


@asynccontextmanager
async def backend(service: Service, **options: Any) -> AsyncIterator[Backend]:
    app = web.Application()
    app.router.add_post("/score", service.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    made = opened(RemoteReward(url=f"http://127.0.0.1:{port}/score", **options), random.Random(0))
    try:
        async with asyncio.timeout(30):
            yield made
    finally:
        await made.close()
        await runner.cleanup()


def always(value: Any) -> Callable[[int], web.Response]:
    return lambda number: web.json_response(value)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 429, 302, 204])
async def test_what_is_refused_is_never_asked_again(status: int) -> None:
    service = Service(lambda number: web.Response(status=status, text="", headers={"Location": "/elsewhere"}))
    async with backend(service) as one:
        with pytest.raises(BackendRefusedError, match=f"HTTP {status}"):
            await one.post({"q": 1}, float)
    assert len(service.asked) == 1


async def test_a_fault_of_the_service_is_asked_again_up_to_its_attempts() -> None:
    service = Service(lambda number: web.Response(status=503, text="busy") if number < 3 else web.json_response(2.5))
    async with backend(service, attempts=3) as one:
        assert await one.post({"q": 1}, float) == 2.5
    failing = Service(lambda number: web.Response(status=500, text="broken"))
    async with backend(failing, attempts=3) as one:
        with pytest.raises(BackendUnavailableError, match=r"in 3 of 3 requests .*HTTP 500: broken"):
            await one.post({"q": 1}, float)
    assert (len(service.asked), len(failing.asked)) == (3, 3)


async def test_a_service_that_never_answers_ends_at_the_deadline() -> None:
    service = Service(always(1.0))
    service.gate.clear()
    async with backend(service, deadline_s=0.3, request_timeout_s=0.1, attempts=100) as one:
        with pytest.raises(BackendUnavailableError, match=r"and 0\.3 s"):
            await one.post({"q": 1}, float)
        service.gate.set()


async def test_nobody_listens() -> None:
    one = opened(RemoteReward(url="http://127.0.0.1:9/score", attempts=2), random.Random(0))
    with pytest.raises(BackendUnavailableError, match="ClientConnectorError"):
        await one.post({}, float)
    await one.close()


async def test_no_more_requests_at_once_than_allowed() -> None:
    service = Service(always(1.0))
    service.gate.clear()
    async with backend(service, concurrency=2, cache_entries=0) as one, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.post({"q": number}, float)) for number in range(6)]
        while service.now < 2:
            await asyncio.sleep(0)
        service.gate.set()
        assert await asyncio.gather(*tasks) == [1.0] * 6
    assert service.most == 2


async def test_turns_are_evenly_spaced() -> None:
    pace, loop = Pace(100.0), asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(pace.turn() for _ in range(11)))
    assert loop.time() - started >= 0.1  # ten gaps of 10 ms


async def test_a_turn_that_would_come_after_the_deadline_fails() -> None:
    service = Service(always(1.0))
    async with backend(service, rate_per_s=0.01, deadline_s=0.2) as one:
        await one.post({"q": 1}, float)
        with pytest.raises(BackendUnavailableError):
            await one.post({"q": 2}, float)
    assert len(service.asked) == 1


async def test_the_same_question_is_asked_once_and_a_failure_is_not_remembered() -> None:
    service = Service(lambda number: web.Response(status=403) if number == 1 else web.json_response(float(number)))
    async with backend(service) as one:
        with pytest.raises(BackendRefusedError):
            await one.post({"a": 1, "b": 2}, float)
        assert await one.post({"a": 1, "b": 2}, float) == 2.0
        assert await one.post({"b": 2, "a": 1}, float) == 2.0
        assert await one.post({"a": 1, "b": 3}, float) == 3.0
    assert len(service.asked) == 3


def test_the_cache_is_bounded_and_drops_the_oldest_use() -> None:
    replies = Replies(2)
    for score, key in enumerate((b"a", b"b")):
        replies.put(key, float(score))
    assert replies.get(b"a") == 0.0
    replies.put(b"c", None)
    assert (b"b" in replies, replies.get(b"a"), len(replies)) == (False, 0.0, 2)
    none = Replies(0)
    none.put(b"a", 1.0)
    assert b"a" not in none


async def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cr3t")
    service = Service(lambda number: web.Response(status=401, text="no such token: s3cr3t"))
    async with backend(service, token_env="JUDGE_TOKEN") as one:
        with pytest.raises(BackendRefusedError) as caught:
            await one.post({}, float)
    assert service.tokens == ["Bearer s3cr3t"]
    assert "s3cr3t" not in str(caught.value) and "***" in str(caught.value)
    monkeypatch.delenv("JUDGE_TOKEN")
    with pytest.raises(SecretError, match="JUDGE_TOKEN"):
        opened(RemoteReward(url="http://h", token_env="JUDGE_TOKEN"))


async def test_what_is_no_score_is_named_and_a_flood_is_cut_off() -> None:
    async with backend(Service(lambda number: web.Response(text="<html>"))) as one:
        with pytest.raises(BackendReplyError, match="expected JSON"):
            await one.post({}, float)
    async with backend(Service(always("a"))) as one:
        for _ in range(2):  # what cannot be read is not remembered either
            with pytest.raises(ValueError, match="could not convert"):
                await one.post({}, float)
        assert len(one.replies) == 0
    flood = Service(lambda number: web.Response(body=b"1" * 100_000))
    async with backend(flood, max_reply_bytes=1000) as one:
        with pytest.raises(BackendReplyError, match="more than max_reply_bytes = 1000"):
            await one.post({}, float)


async def test_an_engine_that_is_started_anew_is_found_at_its_new_address(tmp_path: Path) -> None:
    """While there is none the question waits, and an absence is no failed request."""
    file, service = tmp_path / "engines.json", Service(always(1.0))
    options = ChatReward(engine="judge", engines_file=str(file), attempts=1, cache_entries=0)
    one = opened(options)
    async with backend(service) as other, asyncio.timeout(20):
        asked = asyncio.create_task(one.post({"q": 1}, float, "/score"))
        await asyncio.sleep(0)
        file.write_bytes(orjson.dumps({"judge": [str(other._name).removesuffix("/score")], "policy": []}))
        assert await asked == 1.0
        file.write_bytes(orjson.dumps({"judge": ["http://127.0.0.1:9"]}))
        with pytest.raises(BackendUnavailableError, match="engine group judge gave no score"):
            await one.post({"q": 2}, float, "/score")
    await one.close()


@pytest.mark.parametrize(
    ("reply", "value"),
    [(1, 1.0), (0.5, 0.5), ({"score": -1}, -1.0), ({"reward": 1}, None), ("1", None), (True, None), (None, None)],
)
async def test_a_number_or_an_object_with_one(reply: Any, value: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with backend(Service(always(reply))) as one:
        monkeypatch.setattr(remote, "backend_for", lambda options: one)
        scored = score_remote(Answer(text="r", label="l", prompt="p"), RemoteReward(url="http://h"))
        if value is None:
            with pytest.raises(BackendReplyError, match="expected a number"):
                await scored
        else:
            assert await scored == value


def test_the_question_is_slimes() -> None:
    answer = Answer(text="r", label="l", prompt="p", metadata={"m": 1})
    assert question(answer, RemoteReward(url="http://h")) == {"prompt": "p", "response": "r", "label": "l"}
    assert question(answer, RemoteReward(url="http://h", fields=("metadata",))) == {"metadata": {"m": 1}}
