"""An engine that is canary and cannot do its part gives its place to another, so that the group is not kept waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bus_fixture import DEADLINE_S

from physarum.actors import states
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.gate import Probe
from physarum.actors.engine.trials import Trials
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.engine import EngineConfig
from physarum.weightsync.canary import Trial
from physarum.weightsync.errors import EngineQuarantineError, UpdateRefusedError
from physarum.weightsync.manifest import Manifest

pytestmark = pytest.mark.timeout(60)
LABEL = "policy@1.1"
SETTINGS = EngineConfig.model_validate({"count": 3, "canary": {"gate": f"{__file__}:passes"}})


class FakeActor:
    """As much of an engine's actor as its trials know."""

    def __init__(self, context: object) -> None:
        self.context, self.state = context, "ready"

    def become(self, state: str) -> None:
        self.state = state


class Group:
    """Engines of one group, without their servers."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus, self._publisher = bus, publisher
        self.draining = asyncio.Event()

    def trials(self, me: str, control: object = None) -> Trials:
        model, identity = SimpleNamespace(name="policy"), SimpleNamespace(instance=me)
        config = SimpleNamespace(model=model)
        context = SimpleNamespace(
            bus=self._bus, publisher=self._publisher, config=config, identity=identity, draining=self.draining
        )
        self.actor = FakeActor(context)
        return Trials(cast(Any, self.actor), SETTINGS, "group", cast(EngineControl, control))

    async def trial(self) -> Trial:
        register = Register(self._bus, self._publisher, "weights", Trial)
        found = (await register.get(states.CANARY, "policy", "group")).value
        assert found is not None
        return found


@pytest.fixture
def group(bus: Bus, publisher: Publisher) -> Group:
    return Group(bus, publisher)


async def fail(trials: Trials, error: Exception) -> None:
    with pytest.raises(type(error)):
        async with trials.turn(LABEL):
            raise error


async def test_a_canary_that_does_not_answer_gives_its_place_to_who_waits(group: Group) -> None:
    silent, other = group.trials("silent"), group.trials("other")
    async with asyncio.timeout(DEADLINE_S):
        await fail(silent, UpdateRefusedError("the engine cannot be updated: no answer"))
        async with other.turn(LABEL):
            assert other.judging


async def test_who_waits_for_a_verdict_does_not_hold_up_the_end_of_its_actor(group: Group) -> None:
    async with asyncio.timeout(DEADLINE_S), group.trials("canary").turn(LABEL):
        waiting = asyncio.create_task(fail(group.trials("other"), UpdateRefusedError()))
        group.draining.set()
        await waiting


async def test_a_canary_that_the_version_broke_keeps_others_from_it_for_its_time(group: Group) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await fail(group.trials("broken"), EngineQuarantineError("it died"))
        assert set((await group.trial()).takers) == {"broken"}


async def test_a_canary_that_did_not_answer_is_not_announced_as_ready(group: Group) -> None:
    trials = group.trials("silent")
    group.actor.become("unreachable")
    async with asyncio.timeout(DEADLINE_S):
        await fail(trials, UpdateRefusedError("no answer"))
    trials.stand_down()
    assert group.actor.state == "unreachable" and not trials.judging


@pytest.mark.parametrize(("serves", "verdict"), [(LABEL, "passed"), ("start", "open")])
async def test_an_engine_that_was_started_anew_on_trial_lets_nothing_pass(
    group: Group, monkeypatch: pytest.MonkeyPatch, serves: str, verdict: str
) -> None:
    trials = group.trials("canary", Control(serves))
    monkeypatch.setattr(trials, "_vocabulary", lambda: 8)
    manifest = cast(Manifest, SimpleNamespace(label=LABEL))
    async with asyncio.timeout(DEADLINE_S):
        async with trials.turn(LABEL):
            pass
        reason = await trials.refused(manifest)
        trial = await group.trial()
    assert (trial.verdict, trial.takers) == (verdict, {})
    assert (reason is None) == (verdict == "passed")


async def passes(probe: Probe) -> None:
    """A gate that asks nothing."""


class Control:
    """An engine that says which label it serves."""

    base_url = "http://engine"

    def __init__(self, serves: str) -> None:
        self._serves = serves

    async def live_label(self) -> str:
        return self._serves
