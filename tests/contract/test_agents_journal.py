"""An interrupted episode goes on with what it had: token for token, with the versions that made each, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from test_agents_client import FAST, engine, hangs, says, status

from physarum.agents.client import EngineClient
from physarum.agents.errors import EngineUnavailableError
from physarum.agents.protocols import Client, Generation
from physarum.bus.codec import decode, encode
from physarum.bus.errors import RecordError
from physarum.bus.records import Begun, Task
from physarum.bus.version import Span

pytestmark = pytest.mark.timeout(20)

TASK = Task(id="s/0/0/0", run="t", source="s", ordinal=0, group="g", group_size=1, member=0, sampling={"top_p": 0.5})


async def two_turns(client: Client) -> list[Generation]:
    first = await client.generate([1, 2], max_new_tokens=8)
    second = await client.generate([1, 2, *first.token_ids.tolist(), 9], max_new_tokens=8)
    return [first, second]


def again(client: EngineClient) -> Task:
    """The task as the next worker gets it: what it begun has travelled."""
    assert client.journal is not None
    return decode(encode(msgspec.structs.replace(TASK, begun=client.journal.begun(), interruptions=1)), Task)


class Hanging:
    """An answer that never comes; `reached` tells when it was asked for."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.reached.set()
        return await hangs(request, body)


async def interrupted(client: EngineClient, hanging: Hanging) -> None:
    episode = asyncio.create_task(two_turns(client))
    await hanging.reached.wait()
    episode.cancel()
    await asyncio.gather(episode, return_exceptions=True)


async def test_finished_generations_are_handed_out_again_and_the_rest_is_generated() -> None:
    hanging = Hanging()
    async with engine(says([4, 5], version="p@0.1"), hanging, says([6], version="p@0.2")) as (fake, client):
        before = client.for_task(TASK)
        await interrupted(before, hanging)
        first, second = await two_turns(client.for_task(again(before)))
        assert [body["input_ids"] for body in fake.bodies[2:]] == [[1, 2, 4, 5, 9]]
    assert first.token_ids.tolist() == [4, 5] and first.spans == [Span("p@0.1", 0, 2)]
    assert first.logprobs.tolist() == [-0.5, -0.625]
    assert second.token_ids.tolist() == [6] and second.spans == [Span("p@0.2", 0, 1)]


async def test_an_unfinished_generation_goes_on_behind_the_tokens_held() -> None:
    aborted, hanging = says([4, 5], "abort", version="p@0.1"), Hanging()
    async with engine(aborted, hanging, says([6], version="p@0.2")) as (fake, client):
        before = client.for_task(TASK)
        await interrupted(before, hanging)
        resumed = await client.for_task(again(before)).generate([1, 2], max_new_tokens=8)
        body = fake.bodies[2]
    assert body["input_ids"] == [1, 2, 4, 5]
    assert body["sampling_params"]["max_new_tokens"] == 6
    assert resumed.token_ids.tolist() == [4, 5, 6]
    assert resumed.spans == [Span("p@0.1", 0, 2), Span("p@0.2", 2, 3)]
    assert resumed.finish_reason == "stop"


async def test_other_tokens_or_other_sampling_are_another_request() -> None:
    async with engine(says([4]), says([5]), says([6])) as (fake, client):
        before = client.for_task(TASK)
        await before.generate([1, 2])
        after = client.for_task(again(before))
        assert (await after.generate([1, 3])).token_ids.tolist() == [5]
        assert (await after.generate([1, 2], {"temperature": 0.5})).token_ids.tolist() == [6]
        assert (await after.generate([1, 2])).token_ids.tolist() == [4]
        assert len(fake.bodies) == 3


async def test_equal_requests_get_their_own_generations_in_order() -> None:
    async with engine(says([4]), says([5]), says([6])) as (_, client):
        before = client.for_task(TASK)
        for _ in range(2):
            await before.generate([1])
        after = client.for_task(again(before))
        got = [(await after.generate([1])).token_ids.tolist() for _ in range(3)]
    assert got == [[4], [5], [6]]


async def test_what_nobody_has_asked_for_yet_survives_a_second_interruption() -> None:
    async with engine(says([4]), says([5])) as (fake, client):
        before = client.for_task(TASK)
        await before.generate([1])
        await before.generate([2])
        between = client.for_task(again(before))
        await between.generate([2])
        after = client.for_task(again(between))
        assert (await after.generate([1])).token_ids.tolist() == [4]
        assert (await after.generate([2])).token_ids.tolist() == [5]
        assert len(fake.bodies) == 2


async def test_what_an_engine_could_not_continue_is_generated_anew() -> None:
    """A penalty counts from where the output began: an engine that is handed held tokens would sample otherwise."""
    task = msgspec.structs.replace(TASK, sampling={"repetition_penalty": 1.5})
    async with engine(says([4], "abort"), status(500), says([6]), retry=FAST) as (_, client):
        before = client.for_task(task)
        held = before.journal
        assert held is not None
        aborted = Generation(
            token_ids=np.array([4], np.int32),
            logprobs=np.array([-0.5], np.float32),
            spans=[Span("p@0.1", 0, 1)],
            finish_reason="abort",
            cached_tokens=0,
            prompt_tokens=1,
            started_at=0.0,
            finished_at=1.0,
            rid="r",
        )
        held.open(np.array([1], np.int32), {"repetition_penalty": 1.5, "max_new_tokens": 256}).adopt(aborted)
        assert held.begun() == []
        generation = await before.generate([1])
    assert generation.token_ids.tolist() == [6]


async def test_flaws_and_doubt_travel_with_the_tokens() -> None:
    short = says([4, 5], output_token_logprobs=[[-0.5, 4, None]], weight_versions=None)
    async with engine(short) as (_, client):
        before = client.for_task(TASK)
        made = await before.generate([1])
        resumed = await client.for_task(again(before)).generate([1])
    assert made.flaws and resumed.flaws == made.flaws
    assert resumed.conservative and made.conservative
    assert np.isnan(resumed.logprobs).all()


async def test_the_tokens_of_a_request_that_no_engine_finished_are_kept() -> None:
    async with engine(says([4], "abort"), status(503)) as (_, client):
        before = client.for_task(TASK)
        with pytest.raises(EngineUnavailableError):
            await before.generate([1])
        assert before.journal is not None
        (begun,) = before.journal.begun()
    assert (begun.token_ids.tolist(), begun.finish_reason) == ([4], "abort")


def test_a_generation_whose_arrays_differ_in_length_refuses_to_exist() -> None:
    with pytest.raises(
        RecordError, match=r"generation r has 2 tokens, log-probabilities of shape \(1,\) and spans up to 2"
    ):
        Begun(
            request="00",
            token_ids=np.zeros(2, np.int32),
            logprobs=np.zeros(1, np.float32),
            spans=[Span("p@0.1", 0, 2)],
            finish_reason="stop",
            cached_tokens=0,
            prompt_tokens=1,
            started_at=0.0,
            finished_at=0.0,
            rid="r",
        )
