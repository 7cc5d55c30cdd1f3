"""A router that is asked to stop while it starts: it does not wait for its health, which may take minutes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors.context import Identity
from physarum.actors.router import actor as module
from physarum.actors.router.actor import RouterActor

pytestmark = pytest.mark.timeout(20)


async def test_a_router_that_starts_ends_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, draining = asyncio.Event(), asyncio.Event()

    async def wait_healthy(session: Any, timeout_s: float) -> None:
        draining.set()
        await asyncio.Event().wait()

    async def stop() -> None:
        stopped.set()

    async def start(*given: Any) -> Any:
        return SimpleNamespace(wait_healthy=wait_healthy, stop=stop)

    monkeypatch.setattr(module, "start_router", start)
    monkeypatch.setattr(module, "engine_python", lambda settings: Path("python"))
    settings = SimpleNamespace(start_router={}, env={}, start_timeout_s=600.0)
    context: Any = SimpleNamespace(
        config=SimpleNamespace(engines={"policy": settings}), identity=Identity("run", "router", "router-policy-0"),
        folder=SimpleNamespace(logs=Path("logs"), path=Path("runs/run")), bus=None, publisher=None, draining=draining,
    )  # fmt: skip
    async with asyncio.timeout(5), AsyncExitStack() as stack:
        await RouterActor(context)._started("policy", stack, None)  # type: ignore[arg-type]
    assert stopped.is_set()
