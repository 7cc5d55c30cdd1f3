"""A change of sampling: heard of although a read fails, and no reason to bury tasks where engines refuse it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors import states
from physarum.actors.rollout import live_sampling as module
from physarum.actors.rollout.actor import _changed, _refuses_prompt
from physarum.agents.client import EngineClient
from physarum.agents.errors import EngineRefusedError
from physarum.agents.session import LiveSampling
from physarum.bus.errors import BusRefusedError

pytestmark = pytest.mark.timeout(20)


def test_a_change_that_engines_refuse_is_no_fault_of_the_tasks() -> None:
    client = EngineClient(None, None, None)  # type: ignore[arg-type]  # nothing is sent
    refused = EngineRefusedError("http://e", 400, "no grammar backend")
    assert _refuses_prompt(refused, client) and _changed(client) == "", "the task's own prompt"
    client.live.values = {"regex": "("}
    assert not _refuses_prompt(refused, client) and "actorctl sampling RUN --reset" in _changed(client)


async def test_a_change_is_taken_although_the_first_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    reads = 0

    class Register:
        async def get(self, *key: str) -> Any:
            nonlocal reads
            reads += 1
            if reads == 1:
                raise BusRefusedError("the stream is not there yet")
            return SimpleNamespace(value=states.ChangedSampling({"top_p": 0.5}, 0.0))

        @contextlib.asynccontextmanager
        async def watch(self, *key: str) -> AsyncIterator[asyncio.Event]:
            changed = asyncio.Event()
            changed.set()
            yield changed

    announced, live = asyncio.Event(), LiveSampling()
    context = SimpleNamespace(run_register=lambda kind: Register())
    worker: Any = SimpleNamespace(context=context, facts={}, announce=announced.set)
    following = asyncio.create_task(module.follow_sampling(worker, live))
    await asyncio.wait_for(announced.wait(), 5)
    assert live.values == {"top_p": 0.5} and worker.facts == {"sampling": {"top_p": 0.5}}
    following.cancel()
