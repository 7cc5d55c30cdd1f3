"""The engine client: the engine's choices over aborts and turns, changed sampling, seeds, and tokens of another temperature."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from test_agents_client import engine, says

from physarum.agents.choices import Capture
from physarum.agents.session import EngineChoices
from physarum.bus.records import Task

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

CAPTURE = Capture(layers=(0,), total=1, top_k=1, experts=100, nucleus=True)


def task(member: int = 0, **fields: Any) -> Task:
    return Task(
        id=f"main/0/0/{member}", run="r", source="main", ordinal=member, group="main/0/0", group_size=2, member=member,
        **fields,
    )  # fmt: skip


async def routes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Two tokens; input t took expert t, as far as it was asked for. The first answer is cut short after one."""
    start, ids = body.get("routed_experts_start_len", 0), [4, 8]
    total = len(body["input_ids"]) + 2
    rows = np.arange(start, total - 1, dtype="<i4")
    more = {"routed_experts": base64.b64encode(rows.tobytes()).decode()} if "return_routed_experts" in body else {}
    if "return_sampling_mask" in body:
        more["output_token_sampling_mask"] = [[4, 5], [8]]
    return await says(ids, "abort" if total == 5 else "stop", **more)(request, body)


async def test_the_engines_choices_are_one_record_over_an_abort_and_are_asked_for_once() -> None:
    async with engine(routes, choices=EngineChoices(capture=CAPTURE)) as (fake, client):
        view = client.for_task(task(sampling={"top_p": 0.9, "max_new_tokens": 4}))
        made = await view.generate([1, 2, 3])
        turn = await view.generate([1, 2, 3, 4, 8, 4, 8, 6, 6])
        other = await view.generate([7, 7, 7, 7])
    assert made.token_ids.tolist() == [4, 8, 4, 8]
    assert made.routed_experts is not None and made.routed_experts[:, 0, 0].tolist() == list(range(6))
    assert made.kept_tokens is not None and made.kept_tokens.counts.tolist() == [2, 1, 2, 1]
    assert turn.routed_from == 6 and turn.routed_experts is not None
    assert turn.routed_experts[:, 0, 0].tolist() == [6, 7, 8, 9], "what the turn before reported is not asked for again"
    assert other.routed_from == 0, "another history is another record"
    assert [body["routed_experts_start_len"] for body in fake.bodies] == [0, 4, 6, 0]


async def test_what_an_interrupted_episode_recorded_goes_on_with_it() -> None:
    async with engine(routes, choices=EngineChoices(capture=CAPTURE)) as (fake, client):
        view = client.for_task(task(sampling={"top_p": 0.9, "max_new_tokens": 4}))
        made = await view.generate([1, 2, 3])
        assert view.journal is not None
        again = await client.for_task(task(sampling=dict(view.sampling), begun=view.journal.begun())).generate(
            [1, 2, 3]
        )
        assert len(fake.bodies) == 2
    assert np.array_equal(again.routed_experts, made.routed_experts)  # type: ignore[arg-type]
    assert again.kept_tokens is not None and again.kept_tokens.counts.tolist() == [2, 1, 2, 1]


async def test_evaluations_record_nothing() -> None:
    async with engine(routes, choices=EngineChoices(capture=CAPTURE, temperature=1.0)) as (fake, client):
        made = await client.for_task(task(task_class="eval", sampling={"temperature": 0.2})).generate([1] * 9)
    assert "return_routed_experts" not in fake.bodies[0] and made.routed_experts is None
    assert np.isfinite(made.logprobs).all()


async def test_an_engine_that_reports_no_choices_costs_none_of_its_tokens() -> None:
    async with engine(says([4, 8], routed_experts="AAAA"), choices=EngineChoices(capture=CAPTURE)) as (_, client):
        made = await client.generate([1, 2, 3], {"top_p": 0.5})
    assert made.routed_experts is None and made.kept_tokens is None and np.isfinite(made.logprobs).all()


async def test_tokens_of_another_temperature_are_not_trained_and_counted() -> None:
    async with engine(says([4, 8]), choices=EngineChoices(temperature=1.0)) as (_, client):
        hot = await client.generate([1, 2, 3], {"temperature": 1.5})
        same = await client.generate([1, 2, 3], {"temperature": 1.0})
    assert np.isnan(hot.logprobs).all() and hot.flaws == ("temperature",) and client.flaws["temperature"] == 1
    assert np.isfinite(same.logprobs).all() and same.flaws == ()


async def test_the_next_request_has_what_was_changed_and_a_row_and_a_call_go_before_it() -> None:
    async with engine(says([4, 8])) as (fake, client):
        row = {"sampling": {"min_p": 0.3}}
        view = client.for_task(task(sampling={"top_p": 1.0, "min_p": 0.3, "top_k": -1}, metadata=row))
        evaluated = client.for_task(task(task_class="eval", sampling={"top_p": 1.0}))
        await view.generate([1])
        client.live.values = {"top_p": 0.5, "min_p": 0.1, "top_k": 7}
        await view.generate([1])
        await view.generate([1], {"top_p": 0.25})
        await evaluated.generate([1])
        client.live.values = {}
        await view.generate([1])
    sent = [[body["sampling_params"].get(name) for name in ("top_p", "min_p", "top_k")] for body in fake.bodies]
    assert sent == [[1.0, 0.3, -1], [0.5, 0.3, 7], [0.25, 0.3, 7], [1.0, None, None], [1.0, 0.3, -1]]


async def test_a_rerun_sends_the_same_seeds_and_members_of_a_group_other_ones() -> None:
    async with engine(says([4, 8]), choices=EngineChoices(seed=5)) as (fake, client):
        for member in (0, 0, 1):
            view = client.for_task(task(member))
            await view.generate([1, 2])
            await view.generate([1, 2])
        await client.for_task(task(0)).generate([1, 2], {"sampling_seed": 99})
        await client.for_task(task(0, sampling={"sampling_seed": 6})).generate([1, 2])
    seeds = [body["sampling_params"]["sampling_seed"] for body in fake.bodies]
    assert seeds[:2] == seeds[2:4] and len(set(seeds)) == 6 and seeds[6] == 99
