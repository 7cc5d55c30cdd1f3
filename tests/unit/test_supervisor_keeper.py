"""What a keeper does with an actor that ends: as it is let go, and for good while others do the same work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from physarum.actors.errors import EXIT_UNRECOVERABLE
from physarum.actors.scaling import alike
from physarum.actors.supervisor.errors import ActorFailedError
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


class Failing:
    """An engine that fails at every start; `started` counts."""

    def __init__(self) -> None:
        self.started: list[float] = []
        self.tried = asyncio.Event()

    def start(self, role: str, instance: str, restarts: int) -> Any:
        self.started.append(asyncio.get_running_loop().time())
        if len(self.started) == 4:
            self.tried.set()
        record = SimpleNamespace(pid=len(self.started), log="log")
        return SimpleNamespace(record=record, wait=self._wait, log_tail=lambda: "no memory", ended=False)

    async def _wait(self) -> Exit:
        await asyncio.sleep(0)
        return Exit(1)


def kept(failing: Failing, others_stand: Callable[[], bool]) -> Keeper:
    async def nothing(*of: Any) -> None: ...

    attendance = SimpleNamespace(
        expect=nothing, ended=nothing, state=lambda *of: "starting", was_ready=lambda pid: False,
        forget=lambda instance: None,
    )  # fmt: skip
    launcher = SimpleNamespace(adopt=lambda instance: None, start=failing.start)
    config = SupervisorConfig(backoff_s=0.01, backoff_max_s=0.02)
    keeper = Keeper("engine", "policy-2", cast(Any, launcher), cast(Any, attendance), config, others_stand)
    keeper.begin()
    return keeper


@pytest.mark.timeout(10)
async def test_an_engine_that_does_not_start_is_left_out_while_others_serve(caplog: pytest.LogCaptureFixture) -> None:
    """Engines are cattle: a third one for which there was no memory ended a run that two served."""
    failing = Failing()
    keeper = kept(failing, lambda: True)
    work = asyncio.create_task(keeper.keep())
    await failing.tried.wait()
    keeper.finishing.set()
    await work
    third, fourth = failing.started[2:4]
    assert fourth - third >= 0.04 > 0.02, "it is tried again after ever longer waits"
    assert "for the second time without ever having been ready" in caplog.text and "no memory" in caplog.text
    assert "The run goes on with the others; it is tried again in" in caplog.text


@pytest.mark.timeout(10)
async def test_the_last_engine_that_does_not_start_ends_the_run() -> None:
    with pytest.raises(
        ActorFailedError, match=r"policy-2 .* for the second time(?s:.*)no memory(?s:.*)Remedy: correct"
    ):
        await kept(Failing(), lambda: False).keep()


def test_who_does_the_same_work_stands_in() -> None:
    pair = {"policy": SimpleNamespace(servers=("prefill", "decode")), "solver": SimpleNamespace(servers=())}
    config = cast(Any, SimpleNamespace(engines=pair))
    assert alike(config, "engine", "solver-0", "solver-1") and alike(config, "rollout", "rollout-0", "rollout-7")
    assert not alike(config, "engine", "solver-0", "policy-1") and not alike(config, "engine", "policy-0", "policy-1")
    assert not alike(config, "source", "source-0", "source-1")


@pytest.mark.timeout(10)
async def test_one_that_worked_and_is_started_again_stands_and_one_that_is_left_out_does_not() -> None:
    """A left out engine was tried while its peer restarted: nobody was up, and the run ended."""
    failing = Failing()
    ready = {1}
    out = kept(failing, lambda: True)
    out._attendance = SimpleNamespace(  # type: ignore[assignment]
        expect=_nothing,
        ended=_nothing,
        state=lambda *of: "ready",
        was_ready=ready.__contains__,
        forget=lambda one: None,
    )
    assert out.stands, "its first process is up"
    work = asyncio.create_task(out.keep())
    while len(failing.started) < 2:
        assert out.stands
        await asyncio.sleep(0)
    await failing.tried.wait()
    out.finishing.set()
    await work


async def _nothing(*of: Any) -> None: ...
