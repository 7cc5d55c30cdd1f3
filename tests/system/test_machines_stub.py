"""Two machines of one run: whichever is started first, both come together, and they end together.

Real bus, supervisors and checkpoint actor; the other actors are stubs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from bus_fixture import OwnServer, connect, fresh_run, remove_streams, small_config
from machine_run import TOKEN, HeadRun, MachineRun, at_work, write_machines
from supervisor_run import LIMIT_S, processes_of

from physarum.actors.supervisor.errors import (
    ActorFailedError,
    HeadEndedError,
    InterruptedRunError,
    MachineHeldError,
    MachineRefusedError,
)
from physarum.actors.supervisor.process import read_records
from physarum.bus import layout
from physarum.bus.errors import BusRefusedError
from physarum.bus.lease import TTL_S, LeaseRecord
from physarum.bus.presence import Roster
from physarum.bus.process_clock import started_s
from physarum.bus.process_identity import ProcessIdentity, own
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.bus.server import ServerRecord

pytestmark = pytest.mark.timeout(120)


class Places(NamedTuple):
    """A folder of each machine, and a run's name on the session's server."""

    head: Path
    gpu: Path
    url: str
    name: str

    def write(self, stub: dict[str, str], **sections: object) -> tuple[Path, Path]:
        """The configuration, on both; the second machine has no model."""
        found = [write_machines(folder, self.url, self.name, stub, **sections) for folder in (self.head, self.gpu)]
        for file in (self.gpu / "model").iterdir():
            file.unlink()
        return found[0], found[1]


@pytest_asyncio.fixture
async def places(tmp_path: Path, nats_server: ServerRecord, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Places]:
    monkeypatch.setenv(TOKEN, "a token")
    monkeypatch.setenv("PHYSARUM_CACHE", str(tmp_path / "cache"))
    found = Places(tmp_path / "head", tmp_path / "gpu", nats_server.url, fresh_run())
    for folder in found[:2]:
        folder.mkdir()
    yield found
    bus = await connect(found.url, found.name)
    try:
        with contextlib.suppress(BusRefusedError):  # of a test with a server of its own
            await remove_streams(bus, small_config())
    finally:
        await bus.close()


async def test_a_machine_that_is_first_waits_for_the_head_gets_its_model_and_ends_with_the_run(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = places.head / "gate"
    monkeypatch.setenv("STUB_GATE", str(gate))
    first, other = places.write({"trainer-0": "train 2"})
    machine = MachineRun(other)
    await machine.until(lambda: any("waits for the head" in text for text in machine.watch.said))
    head = HeadRun(first)
    async with at_work(head, machine):
        await machine.until_at_work()
        assert set(machine.pids()) == {"rollout-0", "rollout-1", "reward-0"}
        assert json.loads((machine.folder.path / "start_model.json").read_text())["origin"] == "head"
        given = {path.name: path.read_bytes() for path in machine.folder.start_model.iterdir()}
        assert given == {path.name: path.read_bytes() for path in (places.head / "model").iterdir()}
        gate.touch()
        summary = await head.result()
        await machine.result()
    assert summary["account"]["imbalance"] == 0
    assert not machine.folder.summary.exists() and not processes_of(machine.folder.path)
    late = MachineRun(other)
    await late.result()
    assert any("is finished: nothing is started" in text for text in late.watch.said)


@pytest.mark.slow
async def test_a_machine_that_is_lost_comes_back_and_the_head_goes_on_meanwhile(places: Places) -> None:
    first, other = places.write({})
    head, machine = HeadRun(first), MachineRun(other)
    async with at_work(head, machine):
        await machine.until_at_work()
        before = machine.pids()
        await machine.lose()
        assert not machine.pids() and not head.ended.done()
        again = MachineRun(other)
        async with at_work(again):
            await again.until_at_work()
            assert set(again.pids()) == set(before) and not set(again.pids().values()) & set(before.values())
            assert not set(before) & {record.instance for record in read_records(head.folder.actors)}
            head.stop.ask()
            with pytest.raises(InterruptedRunError, match=f"the head stopped run {places.name}"):
                await again.result()
            with pytest.raises(InterruptedRunError):
                await head.result()


@pytest.mark.slow
async def test_a_bus_that_is_away_for_longer_than_a_lease_ends_no_machine(
    places: Places, own_server: OwnServer
) -> None:
    places = places._replace(url=own_server.url)
    first, other = places.write({})
    head, machine = HeadRun(first), MachineRun(other)
    async with at_work(head, machine):
        await machine.until_at_work()
        await until_settled(places, set(machine.pids()))
        before = machine.pids()
        own_server.kill()
        await asyncio.sleep(TTL_S + 3)
        await own_server.start()
        bus = await connect(own_server.url, places.name)
        try:
            leases = Register(bus, await Publisher(bus).start(), "lease", LeaseRecord)
            async with asyncio.timeout(LIMIT_S), Roster(bus).open() as roster:
                while not {"supervisor-0", "supervisor-gpu-0", *before} <= {one.instance for one in roster.members}:
                    await roster.wait_change(5)
                async with leases.watch("machine-gpu-0") as changed:
                    while (found := (await leases.get("machine-gpu-0")).value) is None:
                        await changed.wait()
                        changed.clear()
        finally:
            await bus.close()
        assert found.process == own() and machine.pids() == before
        assert not machine.ended.done() and not head.ended.done()


async def until_settled(places: Places, instances: set[str]) -> None:
    """Each is past its first heartbeats, and so past its start: one that is just starting may end with the bus."""
    bus = await connect(places.url, places.name)
    try:
        async with Roster(bus).open() as roster, asyncio.timeout(LIMIT_S):
            while len([one for one in roster.members if one.instance in instances and one.sequence > 5]) < len(
                instances
            ):
                await roster.wait_change(5)
    finally:
        await bus.close()


async def test_a_second_head_starts_nothing(places: Places) -> None:
    first, _ = places.write({})
    bus = await connect(places.url, places.name)
    try:
        await layout.create(bus, small_config())
        parent = ProcessIdentity(own().space, os.getppid(), started_s(os.getppid()) or 0.0)
        leases = Register(bus, await Publisher(bus).start(), "lease", LeaseRecord)
        await leases.put(LeaseRecord("supervisor-0 on far", 1, 0.0, parent), "machine-head", ttl_s=TTL_S)
        head = HeadRun(first)
        async with at_work(head):
            with pytest.raises(MachineHeldError, match=f"run {places.name} is led by supervisor-0 on far"):
                await head.result()
            assert not read_records(head.folder.actors)
    finally:
        await bus.close()


@pytest.mark.slow
async def test_a_machine_of_another_configuration_is_refused_by_what_differs(places: Places) -> None:
    first, other = places.write({})
    other.write_text(other.read_text().replace("steps: 3", "steps: 4"))
    head, machine = HeadRun(first), MachineRun(other)
    async with at_work(head, machine):
        with pytest.raises(MachineRefusedError, match=r"another configuration than the head .* `stop\.steps` differ"):
            await machine.result()
        assert not machine.pids()


@pytest.mark.slow
async def test_what_fails_at_the_head_ends_the_machines_by_its_name(places: Places) -> None:
    first, other = places.write({"source-0": "exit 78"})
    head, machine = HeadRun(first), MachineRun(other)
    async with at_work(head, machine):
        with pytest.raises(HeadEndedError, match=r"(?s)failed at its head on .*source/source-0 ended with status 78"):
            await machine.result()


@pytest.mark.slow
async def test_an_actor_that_cannot_run_ends_its_machine_and_not_the_run(places: Places) -> None:
    first, other = places.write(
        {"reward-0": "exit 78"}
    )  # the only one there: of two rollout workers one would be left out
    head, machine = HeadRun(first), MachineRun(other)
    async with at_work(head, machine):
        with pytest.raises(ActorFailedError, match="the actor reward/reward-0 ended with status 78"):
            await machine.result()
        assert not machine.pids() and not head.ended.done()
        bus = await connect(places.url, places.name)
        try:
            async with Roster(bus, "supervisor").open() as supervisors:
                assert [beat.instance for beat in supervisors.members] == ["supervisor-0"]
        finally:
            await bus.close()
