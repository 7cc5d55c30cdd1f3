"""What a weight update does to requests under way, on the real server: nothing is lost, nothing is mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from engine_fixture import LiveEngine, serve
from engine_requests import PROMPT, TOKENS, Streams, generate, spans, worst

from physarum.actors.engine.control import EngineControl, Load
from physarum.actors.engine.errors import EngineRefusedError
from physarum.actors.engine.handing_over import hand_over

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]

REQUESTS = 24
TOLERANCE = 1e-3


@pytest_asyncio.fixture
async def control(engine: LiveEngine) -> AsyncIterator[EngineControl]:
    async with aiohttp.ClientSession() as session:
        yield EngineControl(engine.url, session)


async def test_update_under_load_aborts_nothing_and_both_spans_are_exact(
    engine: LiveEngine, control: EngineControl
) -> None:
    old = await serve(engine, control, seed=0)
    streams = Streams(engine, range(REQUESTS))
    await streams.begun()
    before = await control.loads()
    await control.pause("retract")
    new = engine.next_label()
    await control.update_from_disk(engine.weights(1), new, "retract")
    held = await control.loads()
    await control.continue_generation()
    answers = await streams.answers()

    assert before.running + before.waiting == held.running + held.waiting == REQUESTS
    for number, answer in enumerate(answers):
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == TOKENS == len(answer["meta_info"]["output_token_logprobs"])
        (first, start, middle), (second, again, end) = spans(answer)
        assert (first, second, start, end) == (old, new, 0, TOKENS)
        assert 0 < middle == again < TOKENS
        assert worst(engine, number, answer, 0, middle, seed=0) < TOLERANCE
        assert worst(engine, number, answer, middle, end, seed=1) < TOLERANCE


async def test_no_prompt_cached_under_old_weights_is_reused(engine: LiveEngine, control: EngineControl) -> None:
    await serve(engine, control, seed=0)
    await generate(engine, 30, tokens=2)
    assert (await generate(engine, 30, tokens=2))["meta_info"]["cached_tokens"] == PROMPT - 1
    streams = Streams(engine, range(4))
    await streams.begun()
    await control.pause("retract")
    await control.update_from_disk(engine.weights(1), engine.next_label(), "retract")
    waiting = asyncio.create_task(generate(engine, 30, tokens=2))
    await control.continue_generation()
    answer = await waiting
    await streams.answers()
    assert answer["meta_info"]["cached_tokens"] == 0
    assert worst(engine, 30, answer, 0, 2, seed=1) < TOLERANCE


async def test_without_flush_old_kv_would_serve_new_tokens_and_cached_tokens_would_not_tell(
    engine: LiveEngine, control: EngineControl
) -> None:
    """Why update_from_disk flushes. Should this ever fail, the server has learnt to do better: simplify."""
    await serve(engine, control, seed=0)
    streams = Streams(engine, [0, 1], extra_key="policy@1.0")
    await streams.begun()
    await control.pause("retract")
    body = {"model_path": str(engine.weights(1)), "weight_version": engine.next_label(), "flush_cache": False}
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"{engine.url}/update_weights_from_disk", json=body)
        assert response.status == 200
    await control.continue_generation()
    for number, answer in enumerate(await streams.answers()):
        (_, _, middle), (_, _, end) = spans(answer)
        assert worst(engine, number, answer, middle, end, seed=1) > 0.1
        assert answer["meta_info"]["cached_tokens"] == 0


async def test_in_place_keeps_requests_and_extra_key_keeps_their_kv_from_new_ones(
    engine: LiveEngine, control: EngineControl
) -> None:
    old = await serve(engine, control, seed=0)
    streams = Streams(engine, range(4), extra_key=old)
    await streams.begun()
    await control.pause("in_place")
    new = engine.next_label()
    await control.update_from_disk(engine.weights(1), new, "in_place")
    await control.continue_generation()
    answers = await streams.answers()
    assert [len(spans(answer)) for answer in answers] == [2] * 4
    assert all(answer["meta_info"]["num_retractions"] == 0 for answer in answers)
    fresh = await generate(engine, 0, tokens=4, extra_key=new)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert worst(engine, 0, fresh, 0, 4, seed=1) < TOLERANCE


async def test_renaming_the_version_aborts_nothing(engine: LiveEngine, control: EngineControl) -> None:
    await serve(engine, control, seed=0)
    streams = Streams(engine, range(REQUESTS))
    await streams.begun()
    label = engine.next_label()
    await control.set_version_label(label)
    answers = await streams.answers()
    assert await control.live_label() == label
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"length"}


async def test_abort_ends_one_request_and_returns_what_it_has(engine: LiveEngine, control: EngineControl) -> None:
    await serve(engine, control, seed=0)
    doomed, other = Streams(engine, [1], rid="doomed"), Streams(engine, [2], rid="other")
    await asyncio.gather(doomed.begun(), other.begun())
    await control.abort("doomed")
    (cut,), (whole,) = await asyncio.gather(doomed.answers(), other.answers())
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(cut["output_ids"]) < TOKENS == len(whole["output_ids"])


async def test_a_folder_without_weights_is_refused_by_name(engine: LiveEngine, control: EngineControl) -> None:
    await serve(engine, control, seed=0)
    empty = engine.folder / "empty"
    empty.mkdir()
    await control.pause("retract")
    with pytest.raises(EngineRefusedError, match="answered 400"):
        await control.update_from_disk(empty, engine.next_label(), "retract")
    await control.update_from_disk(engine.weights(0), engine.next_label(), "retract")
    await control.continue_generation()
    assert len((await generate(engine, 3, tokens=4))["output_ids"]) == 4


async def test_the_server_reports_what_its_limit_rests_on(engine: LiveEngine, control: EngineControl) -> None:
    """Capacity, tokens made and prefilled: without `--enable-metrics` it would report no throughput."""
    await serve(engine, control, seed=0)
    answers = asyncio.ensure_future(Streams(engine, range(REQUESTS)).answers())
    seen: list[Load] = []
    while not answers.done():
        seen.append(await control.loads())
        await asyncio.sleep(0.05)
    await answers
    busy = max(seen, key=lambda load: load.generated_tokens_per_s)
    assert busy.generated_tokens_per_s > 0 and busy.running > 0
    assert busy.capacity_tokens is not None and busy.capacity_tokens > REQUESTS * (PROMPT + TOKENS)
    assert busy.running_at_most is not None and busy.running_at_most >= REQUESTS
    assert (busy.prefilled_tokens or 0) >= REQUESTS * (PROMPT - 1)
    assert (await control.capabilities()).longest_tokens


async def test_a_server_that_is_to_end_gives_every_request_back_with_its_tokens(
    engine: LiveEngine, control: EngineControl
) -> None:
    await serve(engine, control, seed=0)
    streams = Streams(engine, range(REQUESTS))
    await streams.begun()
    assert await hand_over(control) == REQUESTS
    answers = await streams.answers()
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    assert all(0 < len(answer["output_ids"]) < TOKENS for answer in answers)
    assert all(len(one["output_ids"]) == len(one["meta_info"]["output_token_logprobs"]) for one in answers)
    assert (await generate(engine, 40, tokens=2))["meta_info"]["finish_reason"]["type"] == "length", (
        "it goes on serving"
    )
