"""Control services: an answer, an error by name, or a clear word that nobody is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from bus_fixture import Connect

from physarum.bus import control
from physarum.bus.connection import Bus
from physarum.bus.errors import BusRefusedError, BusUnreachableError

pytestmark = pytest.mark.timeout(30)


async def status(body: dict[str, Any]) -> dict[str, Any]:
    return {"state": "running", "asked": body}


async def refuse(body: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("state is 'stopped';\r\nexpected 'running':\n start it first")


async def fail(body: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("a fault in the actor")


async def hang(body: dict[str, Any]) -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


@pytest_asyncio.fixture
async def caller(bus: Bus, connect_again: Connect) -> AsyncIterator[Bus]:
    verbs = {"status": status, "refuse": refuse, "fail": fail, "hang": hang}
    service = await control.serve(bus, "engine", "e-0", verbs)
    await bus.flush()
    yield await connect_again("caller")
    await service.stop()


async def test_a_verb_answers_with_what_it_was_asked(caller: Bus) -> None:
    assert await control.call(caller, "engine", "e-0", "status", {"a": 1}, 5) == {"state": "running", "asked": {"a": 1}}


async def test_an_error_of_several_lines_comes_back_whole(caller: Bus) -> None:
    found = await control.call(caller, "engine", "e-0", "refuse", {}, 5)
    assert found == {"error": "state is 'stopped'; expected 'running': start it first"}


async def test_a_fault_in_a_verb_is_an_answer_too_and_the_next_call_is_served(caller: Bus) -> None:
    found = await control.call(caller, "engine", "e-0", "fail", {}, 5)
    assert "a fault in the actor" in found["error"]
    assert (await control.call(caller, "engine", "e-0", "status", {}, 5))["state"] == "running"


async def test_a_hanging_verb_ends_at_the_deadline_and_does_not_block_the_others(caller: Bus) -> None:
    with pytest.raises(BusUnreachableError, match=r"no answer from ph\..*\.control\.engine\.e-0\.hang within 0\.2 s"):
        await control.call(caller, "engine", "e-0", "hang", {}, 0.2)
    assert (await control.call(caller, "engine", "e-0", "status", {}, 5))["state"] == "running"


async def test_nobody_there_is_known_at_once(caller: Bus) -> None:
    started = time.monotonic()
    with pytest.raises(BusRefusedError, match=r"nobody serves ph\..*\.control\.engine\.e-9\.status"):
        await control.call(caller, "engine", "e-9", "status", {}, 30)
    assert time.monotonic() - started < 5
