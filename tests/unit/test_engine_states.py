"""The state that an engine announces: one that was cordoned in the middle of something is not left there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors.engine import following as module
from physarum.actors.engine.following import Following
from physarum.actors.engine.load import UNREACHABLE
from physarum.actors.engine.trials import Trials
from physarum.actors.policy_engines import HANDING_OVER
from physarum.actors.runtime import PAUSED, Actor
from physarum.bus.errors import BusError

pytestmark = pytest.mark.timeout(20)

V1 = "policy@1.1"


class Engine(Actor):
    role = "engine"

    async def run(self) -> None: ...

    def cordon(self) -> None:
        """As the control service does it (runtime.py)."""
        self.behind_pause = self.state
        self.context.paused = True
        self.become(PAUSED)

    def uncordon(self) -> None:
        self.context.paused = False
        self.become(self.behind_pause)


def engine() -> Engine:
    context: Any = SimpleNamespace(
        config=None, bus=None, publisher=None, identity="engine/policy-0", draining=asyncio.Event(), paused=False
    )
    made = Engine(context)
    made.become("ready")
    made.facts = {"version": V1}
    return made


def half_of_a_pair(actor: Engine, monkeypatch: pytest.MonkeyPatch, during: Callable[[], None]) -> Following:
    @contextlib.asynccontextmanager
    async def turn(label: str) -> AsyncIterator[None]:
        yield

    async def hand_over(control: Any) -> int:
        during()
        return 0

    async def live_label() -> str:
        return V1

    monkeypatch.setattr(module, "hand_over", hand_over)
    found = Following.__new__(Following)
    found._actor, found._settings = actor, SimpleNamespace(paired=True, pause="retract")  # type: ignore[assignment]
    found._trials = SimpleNamespace(turn=turn, judging=False)  # type: ignore[assignment]
    found._receiver = SimpleNamespace(live=object(), quarantined=None, touching=False)  # type: ignore[assignment]
    found._control = SimpleNamespace(live_label=live_label)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("cordoned", ["before", "during"])
async def test_a_half_cordoned_around_an_update_that_fails_is_ready_again_afterwards(
    cordoned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = engine()
    if cordoned == "before":
        actor.cordon()
    half = half_of_a_pair(actor, monkeypatch, actor.cordon if cordoned == "during" else lambda: None)
    with pytest.raises(BusError):
        async with half._turn("policy@1.2"):
            raise BusError("nothing was loaded")
    assert actor.state == PAUSED
    actor.uncordon()
    assert actor.state == "ready", "it would take no request until the next version"


async def test_a_half_that_hands_over_is_not_made_ready_by_a_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = engine()
    half = half_of_a_pair(actor, monkeypatch, lambda: None)
    actor.become(HANDING_OVER)
    await half.check()
    assert actor.state == HANDING_OVER
    actor.become(UNREACHABLE)
    await half.check()
    assert actor.state == "ready"


async def test_a_canary_that_was_cordoned_before_its_trial_is_not_left_paused() -> None:
    async def admitted(label: str) -> bool:
        return True

    actor = engine()
    trials = Trials.__new__(Trials)
    trials._actor, trials._canary = actor, SimpleNamespace(admitted=admitted)  # type: ignore[assignment]
    actor.cordon()
    await trials._admitted("policy@1.2")
    actor.uncordon()
    assert actor.state == "canary"
    trials.stand_down()
    assert actor.state == "ready"
