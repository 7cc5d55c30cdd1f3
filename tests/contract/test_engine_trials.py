"""An engine that is canary and cannot do its part gives its place to another, so that the group is not kept waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bus_fixture import DEADLINE_S

from physarum.actors import states
from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import NothingPassedError
from physarum.actors.engine.gate import Probe
from physarum.actors.engine.trials import Trials
from physarum.actors.errors import UnrecoverableError
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.version import Fork, Version
from physarum.configs.engine import EngineConfig
from physarum.weightsync.canary import Canary, Trial
from physarum.weightsync.errors import EngineQuarantineError, UpdateRefusedError
from physarum.weightsync.manifest import Manifest, TensorEntry, manifest_digest

pytestmark = pytest.mark.timeout(60)
LABEL = "policy@1.1"
SETTINGS = EngineConfig.model_validate({"count": 3, "canary": {"gate": f"{__file__}:passes"}})


class FakeActor:
    """As much of an engine's actor as its trials know."""

    def __init__(self, context: object) -> None:
        self.context, self.state = context, "ready"

    @property
    def own_state(self) -> str:
        return self.state

    def become(self, state: str) -> None:
        self.state = state


class Group:
    """Engines of one group, without their servers."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus, self._publisher = bus, publisher
        self.register, self.key = Register(bus, publisher, "weights", Trial), (states.CANARY, "policy", "group")
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
        found = (await self.register.get(*self.key)).value
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


async def test_a_canary_that_drains_as_it_is_admitted_keeps_no_place(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place was stored; the answer had not come when it was asked to end."""
    put = Canary._put

    async def slow(canary: Canary, trial: Trial, revision: int) -> None:
        await put(canary, trial, revision)
        if trial.takers and not group.draining.is_set():
            group.draining.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(Canary, "_put", slow)
    async with asyncio.timeout(DEADLINE_S):
        await fail(group.trials("leaving"), UpdateRefusedError("not loaded"))
        assert (await group.trial()).takers == {}


@pytest.mark.parametrize("draining", [True, False])
async def test_a_canary_that_is_ended_gives_its_place_only_where_its_actor_drains(group: Group, draining: bool) -> None:
    """Else its engine may have died of the version."""
    began = asyncio.Event()

    async def load() -> None:
        async with group.trials("ended").turn(LABEL):
            began.set()
            await asyncio.Event().wait()

    async with asyncio.timeout(DEADLINE_S):
        loading = asyncio.create_task(load())
        await began.wait()
        if draining:
            group.draining.set()
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert set((await group.trial()).takers) == (set() if draining else {"ended"})


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
    manifest = Manifest(
        version=Version.parse(LABEL), parent=None, model_digest="m", tensors=(TensorEntry("w", "float32", (0,), ()),),
        total_bytes=0, step=1, created=0.0,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        async with trials.turn(LABEL):
            pass
        reason = await trials.refused(manifest)
        trial = await group.trial()
    assert (trial.verdict, trial.takers) == (verdict, {})
    assert trial.passed_manifest == (manifest_digest(manifest) if verdict == "passed" else "")
    assert (reason is None) == (verdict == "passed")


def head(label: str, withdrawn: tuple[Fork, ...] = ()) -> states.Head:
    return states.Head(
        label=label, epoch=1, number=1, manifest="", total_bytes=0, published_at=0.0, withdrawn=withdrawn
    )


async def test_the_first_version_refused_ends_the_run_by_name(group: Group) -> None:
    mine = Canary(group.register, group.key, "canary", 1, 60.0)
    async with asyncio.timeout(DEADLINE_S):
        assert await mine.admitted(LABEL)
        await mine.vote(LABEL, "worse than nothing")
        with pytest.raises(
            NothingPassedError, match=r"policy@1\.1 was refused by its canary \(canary: worse than nothing\)"
        ):
            await group.trials("other").wanted(head(LABEL), serves_nothing=True)
    assert issubclass(NothingPassedError, UnrecoverableError)


async def test_what_was_withdrawn_is_not_what_a_refused_head_falls_back_to(group: Group) -> None:
    mine = Canary(group.register, group.key, "canary", 1, 60.0)
    async with asyncio.timeout(DEADLINE_S):
        for label, refusal in ((LABEL, None), ("policy@2.0", "bad")):
            assert await mine.admitted(label)
            await mine.vote(label, refusal, f"manifest of {label}")
        other = group.trials("other")
        assert await other.wanted(head("policy@2.0"), serves_nothing=False) == (LABEL, f"manifest of {LABEL}")
        with pytest.raises(NothingPassedError):
            await other.wanted(head("policy@2.0", (Fork(1, 0),)), serves_nothing=False)


async def test_an_engine_with_nothing_serves_what_passed_while_others_try_the_head(group: Group) -> None:
    mine = Canary(group.register, group.key, "canary", 1, 60.0)
    async with asyncio.timeout(DEADLINE_S):
        assert await mine.admitted(LABEL)
        await mine.vote(LABEL, None)
        assert await mine.admitted("policy@1.2")
        newest, other = head("policy@1.2"), group.trials("other")
        assert (await other.wanted(newest, serves_nothing=True)).label == LABEL
        assert (await other.wanted(newest, serves_nothing=False)).label == "policy@1.2"
        assert (
            await group.trials("canary").wanted(newest, serves_nothing=True)
        ).label == "policy@1.2"  # it is its canary
        await mine.leave("policy@1.2")
        assert (await other.wanted(newest, serves_nothing=True)).label == "policy@1.2"  # it may try it itself


async def passes(probe: Probe) -> None:
    """A gate that asks nothing."""


class Control:
    """An engine that says which label it serves."""

    base_url = "http://engine"

    def __init__(self, serves: str) -> None:
        self._serves = serves

    async def live_label(self) -> str:
        return self._serves
