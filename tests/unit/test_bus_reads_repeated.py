"""A register that cannot be read for a moment ends nobody: after an outage no event says when streams are served again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors import states
from physarum.actors.engine import following as following_module
from physarum.actors.engine.following import Following
from physarum.actors.supervisor import scaler as scaler_module
from physarum.actors.supervisor.scaler import Scaler
from physarum.bus.errors import BusRefusedError

pytestmark = pytest.mark.timeout(20)


class Register:
    """Its first read fails."""

    def __init__(self, value: Any) -> None:
        self.value, self.reads = value, 0

    async def get(self, *key: str) -> Any:
        self.reads += 1
        if self.reads == 1:
            raise BusRefusedError("the stream is not there yet")
        return SimpleNamespace(value=self.value)

    @contextlib.asynccontextmanager
    async def watch(self, *key: str) -> AsyncIterator[asyncio.Event]:
        changed = asyncio.Event()
        changed.set()
        yield changed


async def test_the_supervisor_goes_on_to_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler_module, "_AGAIN_S", 0.01)
    register, applied = Register(states.Scaled({}, 0.0)), asyncio.Event()
    scaler = Scaler(None, register, None, None)  # type: ignore[arg-type]  # what it uses of them is below
    scaler._apply = lambda scaled: applied.set()  # type: ignore[method-assign]
    keeping = asyncio.create_task(scaler.keep())
    await asyncio.wait({keeping, waits := asyncio.create_task(applied.wait())}, return_when="FIRST_COMPLETED")
    assert waits.done() and not keeping.done()
    keeping.cancel()


async def test_an_engine_goes_on_to_the_next_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each engine of the run would be started anew, and what it had in hand be lost."""
    head = SimpleNamespace(label="policy@1.2")
    monkeypatch.setattr(following_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(following_module, "Register", lambda *given: Register(head))
    monkeypatch.setattr(following_module, "head_key", lambda config, group: ("head", "policy"))
    found = Following.__new__(Following)
    found._actor = SimpleNamespace(bus=None, publisher=None, config=None)  # type: ignore[assignment]
    found._group, brought = "policy", asyncio.Event()

    async def bring_to(head: Any, receiver: Any, services: Any) -> bool:
        brought.set()
        return True

    async def wait_change(timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return False

    found._bring_to = bring_to  # type: ignore[method-assign]
    services: Any = SimpleNamespace(wait_change=wait_change)
    following = asyncio.create_task(found._follow(None, services))  # type: ignore[arg-type]
    await asyncio.wait({following, waits := asyncio.create_task(brought.wait())}, return_when="FIRST_COMPLETED")
    assert waits.done() and not following.done()
    following.cancel()
