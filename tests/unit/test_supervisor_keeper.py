"""An actor that is let go while its end is being told was let go: nobody starts it again, and no run ends by it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from physarum.actors.errors import EXIT_UNRECOVERABLE
from physarum.actors.supervisor.keeper import Keeper
from physarum.actors.supervisor.policy import Exit
from physarum.configs.supervisor import SupervisorConfig


@pytest.mark.timeout(10)
async def test_one_that_dies_as_it_is_drained_is_not_started_again() -> None:
    started: list[str] = []

    async def wait() -> Exit:
        return Exit(EXIT_UNRECOVERABLE)  # which ends the run of whoever is wanted

    def start(role: str, instance: str, restarts: int) -> Any:
        started.append(instance)
        return SimpleNamespace(record=SimpleNamespace(pid=len(started), log="log"), wait=wait, log_tail=list)

    async def expect(role: str, instance: str) -> None: ...

    async def ended(instance: str, pid: int) -> None:
        keeper.finishing.set()  # `actorctl drain`, while the bus was being told

    attendance = SimpleNamespace(
        expect=expect, ended=ended, state=lambda *of: "ready", was_ready=lambda pid: True, forget=lambda instance: None
    )
    launcher = SimpleNamespace(adopt=lambda instance: None, start=start)
    keeper = Keeper("engine", "policy-1", cast(Any, launcher), cast(Any, attendance), SupervisorConfig())
    keeper.begin()
    async with asyncio.timeout(5):
        await keeper.keep()
    assert started == ["policy-1"]
