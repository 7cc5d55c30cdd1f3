"""`actorctl sampling` while a run goes on: the next request has it, and so has a worker that comes later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from actor_fixture import running
from aiohttp import web
from bus_fixture import DEADLINE_S
from test_fault_rollout import ASKING, StubEngine, actor, announced, issue, ordinals

from physarum.actors.engine.schema import inspect_server
from physarum.actors.rollout.actor import RolloutActor
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import RunUnfitError
from physarum.actors.tools.sampling import change_sampling, sampling
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(60)


class Asked(StubEngine):
    def __init__(self) -> None:
        super().__init__()
        self.sampling: list[dict[str, Any]] = []

    async def says(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.sampling.append(body["sampling_params"])
        return await super().says(request, body)


def opened(made: RolloutActor) -> OpenRun:
    context = made.context
    return OpenRun(context.folder, context.config, context.bus, context.publisher, live=True)


async def until_taken(made: RolloutActor, values: dict[str, Any]) -> None:
    """The worker says that it has heard of the change."""
    async with asyncio.timeout(DEADLINE_S):
        while made.facts.get("sampling") != values:
            made._announce_now.clear()
            await made._announce_now.wait()


async def test_a_change_reaches_the_next_request_and_a_worker_that_comes_later(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    engine = Asked()
    async with engine.serving() as port:
        made = actor(tmp_path, bus, publisher, *ASKING)
        await announced(bus, publisher, "policy-0", port, 1)
        await issue(made, ["ask"])
        async with running(made):
            await ordinals(bus, 1)
            now = await change_sampling(opened(made), ["top_p=0.5", "min_p=0.1"])
            assert (now["top_p"], now["min_p"], now["temperature"]) == (0.5, 0.1, 1.0)
            await until_taken(made, {"top_p": 0.5, "min_p": 0.1})
            await issue(made, ["ask"], start=1)
            await ordinals(bus, 2)
        later = actor(tmp_path, bus, publisher, *ASKING)
        await issue(later, ["ask"], start=2)
        async with running(later):
            await ordinals(bus, 3)
            await change_sampling(opened(later), [], reset=True)
            await until_taken(later, {})
    assert [one.get("min_p") for one in engine.sampling] == [None, 0.1, 0.1]


async def test_a_parameter_that_the_installed_engine_does_not_know_is_refused(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Else every answer from now on is a refusal. What no engine of this host has told is not judged."""
    python = tmp_path / "python"
    told = 'physarum-schema:{"arguments": [], "sampling": ["top_p", "top_k"]}'
    python.write_text(f"#!/bin/sh\ncase \"$2\" in *importlib.metadata*) echo 0.4.1 ;; *) echo '{told}' ;; esac\n")
    python.chmod(0o755)
    run = opened(actor(tmp_path, bus, publisher, *ASKING, f"engines.policy.python={python}"))
    assert (await change_sampling(run, ["min_p=0.1"]))["min_p"] == 0.1
    await inspect_server(python, {}, run.folder.path.parent / ".cache")  # as an engine does that is started
    with pytest.raises(RunUnfitError, match=r"sglang 0.4.1, .* has no sampling parameter min_p"):
        await change_sampling(run, ["top_p=0.5", "min_p=0.2"])
    assert ((await sampling(run))["min_p"], (await sampling(run))["top_p"]) == (0.1, 1.0)
    assert (await change_sampling(run, ["top_p=0.5"]))["top_p"] == 0.5


async def test_a_finished_run_and_an_unknown_name_are_refused_and_change_nothing(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    made = actor(tmp_path, bus, publisher, *ASKING)
    run = opened(made)
    with pytest.raises(RunUnfitError, match="did you mean 'top_p'"):
        await change_sampling(run, ["top_k=5", "topp=0.5"])
    assert (await sampling(run))["top_k"] == -1
    run.folder.path.mkdir(parents=True, exist_ok=True)
    run.folder.summary.write_text("{}")
    with pytest.raises(RunUnfitError, match="is finished"):
        await change_sampling(run, ["top_k=5"])
