"""`client.of(name)`: one episode on the engines of two policies, with one clock, budget and journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_agents_client import Fake, engine, says
from test_agents_journal import TASK, again

from physarum.agents.client import EngineClient
from physarum.agents.policies import NoPolicyError, Policies, PolicyParts
from physarum.agents.session import EngineChoices
from physarum.agents.tokenizer import FolderTokenizer

pytestmark = pytest.mark.timeout(20)


@asynccontextmanager
async def two(
    sampling: dict[str, Any] | None = None, choices: EngineChoices | None = None, **options: Any
) -> AsyncIterator[tuple[Fake, Fake, EngineClient]]:
    """The engines of "policy" and of "solver"; a client that begins on the first. `sampling`, `choices`: the solver's."""
    async with engine(says([6], version="solver@0.3")) as (solver, _):
        parts = PolicyParts(solver, FolderTokenizer(Path("other")), choices or EngineChoices(), sampling)
        policies = Policies[EngineClient]("policy", {"solver": parts})
        async with engine(says([4, 5], version="policy@0.1"), policies=policies, **options) as (fake, client):
            yield fake, solver, client


async def test_turns_alternate_between_the_engines_of_both() -> None:
    async with two() as (own, other, base):
        client = base.for_task(TASK)
        solver = client.of("solver")
        made = [
            await one.generate([1, 2]) for one in (client, solver, client, solver.of("policy"), client.of("solver"))
        ]
        assert client.of("solver") is solver and solver.of("policy") is client and solver.of("solver") is solver
    said = ["policy@0.1", "solver@0.3", "policy@0.1", "policy@0.1", "solver@0.3"]
    assert [one.spans[0].version for one in made] == said
    assert (len(own.bodies), len(other.bodies)) == (3, 2)
    assert [one.prefers for one in own.wanted] == ["", "e0", "e0"], "each policy has a session of its own"
    assert [one.prefers for one in other.wanted] == ["", "e0"]
    assert (
        solver.tokenizer is not client.tokenizer and solver.journal is client.journal and solver.clock is client.clock
    )


async def test_a_policys_own_sampling_takes_the_place_of_the_tasks() -> None:
    async with two({"temperature": 0.7, "max_new_tokens": 9}, EngineChoices(temperature=0.7)) as (own, other, base):
        client = base.for_task(TASK)
        made = await client.of("solver").generate([1, 2])
        await client.generate([1, 2], max_new_tokens=3)
    assert other.bodies[0]["sampling_params"] == {"temperature": 0.7, "max_new_tokens": 9}
    assert own.bodies[0]["sampling_params"] == {"top_p": 0.5, "max_new_tokens": 3}
    assert np.isfinite(made.logprobs).all(), "they are of the temperature that the solver's trainer has"


async def test_without_one_it_draws_as_the_task_says_and_at_its_trainers_temperature_or_untrained() -> None:
    async with two(None, EngineChoices(temperature=0.7)) as (_, other, base):
        made = await base.for_task(TASK).of("solver").generate([1, 2], max_new_tokens=3)
    assert other.bodies[0]["sampling_params"] == {"top_p": 0.5, "max_new_tokens": 3}
    assert np.isnan(made.logprobs).all() and made.flaws == ("temperature",)


async def test_an_episode_has_one_budget_whoever_speaks() -> None:
    async with two(episode_tokens=3) as (_, other, base):
        client = base.for_task(TASK)
        await client.generate([1, 2], max_new_tokens=8)
        await client.of("solver").generate([1, 2], max_new_tokens=8)
        nothing = await client.of("solver").generate([1, 2], max_new_tokens=8)
    assert other.bodies[0]["sampling_params"]["max_new_tokens"] == 1
    assert (len(nothing.token_ids), nothing.finish_reason, len(other.bodies)) == (0, "length", 1)


async def test_an_interrupted_task_gives_each_policy_its_own_tokens_back() -> None:
    """Both were asked the same; the next worker asks in another order."""
    async with two() as (own, other, base):
        client = base.for_task(TASK)
        for one in (client, client.of("solver")):
            await one.generate([1, 2], max_new_tokens=8)
        after = base.for_task(again(client))
        found = [await one.generate([1, 2], max_new_tokens=8) for one in (after.of("solver"), after)]
        assert (len(own.bodies), len(other.bodies)) == (1, 1), "nothing is generated again"
    assert [one.spans[0].version for one in found] == ["solver@0.3", "policy@0.1"]


async def test_an_unknown_policy_is_named_with_the_nearest() -> None:
    async with two() as (_, _, base):
        with pytest.raises(NoPolicyError, match=r"trains no policy 'solve'.*did you mean 'solver'"):
            base.for_task(TASK).of("solve")
    async with engine(says([1])) as (_, alone):
        with pytest.raises(NoPolicyError, match="there are: none by name"):
            alone.for_task(TASK).of("solver")
