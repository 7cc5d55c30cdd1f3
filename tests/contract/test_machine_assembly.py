"""Machines meet and end by the head's word on a real bus, in any order; who does not fit is refused by name."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from bus_fixture import DEADLINE_S, Connect

from physarum.actors import orphanhood, states
from physarum.actors.address import VARIABLE
from physarum.actors.context import Identity
from physarum.actors.supervising import INSTANCE, until_alone
from physarum.actors.supervisor.assembly import Head, Membership, sources_of
from physarum.actors.supervisor.errors import (
    HeadAbsentError,
    HeadEndedError,
    InterruptedRunError,
    MachineHeldError,
    MachineRefusedError,
    VersionError,
)
from physarum.actors.supervisor.machine_lease import MachineLease
from physarum.actors.supervisor.run_folder import LAYOUT
from physarum.bus.connection import Bus
from physarum.bus.lease import LeaseRecord
from physarum.bus.presence import GONE, Heartbeat, Roster, announce
from physarum.bus.process_clock import started_s
from physarum.bus.process_identity import ProcessIdentity, own
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.machines import HEAD
from physarum.configs.portable import portable
from physarum.configs.root import RootConfig

MACHINE = "gpu-1"


def config(run: str, orphan_s: float = 60.0, **changes: Any) -> RootConfig:
    values: dict[str, Any] = {
        "run": {"name": run, "orphan_timeout_s": orphan_s},
        "bus": {"url": "nats://bus:4222"},
        "machines": {"gpu": {"count": 2, "rollout": 1}},
        "checkpoint": {"token_env": "TOKEN"},
        "model": {"path": "m"},
        "source": {"hook": "physarum.agents.calculator.problems:Problems"},
        "rollout": {"count": 2},
        "trainer": {"objective": "sft", "lr": 1e-3},
        "stop": {"steps": 1},
        "supervisor": {"join_timeout_s": 5.0, "drain_timeout_s": 0.2},
    }
    return RootConfig.model_validate({**values, **changes}, strict=False)


def beat(role: str, instance: str, state: str = "ready") -> Heartbeat:
    return Heartbeat(role=role, instance=instance, state=state, pid=1, host="there", started_at=1.0, sequence=1)


async def head_is_there(bus: Bus, publisher: Publisher, state: str = "ready") -> None:
    await announce(bus, publisher, msgspec.structs.replace(beat("supervisor", INSTANCE, state), sequence=2))


async def test_a_machine_that_is_first_hears_the_head_when_it_opens_the_run(
    bus: Bus, publisher: Publisher, connect_again: Connect
) -> None:
    other = await connect_again("other")
    membership = Membership(config(bus.run), MACHINE, other, await Publisher(other).start())
    waiting = asyncio.create_task(membership.opened())
    head = Head(config(bus.run), bus, publisher, "10.0.0.1")
    await head.end(InterruptedRunError("of an earlier start"))
    await asyncio.sleep(0)
    assert not waiting.done()
    await head.open()
    async with asyncio.timeout(DEADLINE_S):
        opened = await waiting
    assert (opened.phase, opened.address, opened.host) == ("open", "10.0.0.1", socket.gethostname())
    membership.refuse_unlike(opened, "10.0.0.2")


async def test_a_head_that_does_not_come_is_named_with_the_time(bus: Bus, publisher: Publisher) -> None:
    late = config(bus.run, supervisor={"join_timeout_s": 0.1})
    with pytest.raises(HeadAbsentError, match=r"machine gpu-1: the head of run .* within 0\.1 s"):
        await Membership(late, MACHINE, bus, publisher).opened()


async def test_the_end_at_the_head_is_the_end_of_each_machine_by_its_kind(bus: Bus, publisher: Publisher) -> None:
    made = config(bus.run)
    head, membership = Head(made, bus, publisher, "10.0.0.1"), Membership(made, MACHINE, bus, publisher)
    faults: list[tuple[BaseException | None, type[Exception] | None, str]] = [
        (None, None, ""),
        (InterruptedRunError("asked"), InterruptedRunError, "the head stopped run"),
        (RuntimeError("the disk is full"), HeadEndedError, "failed at its head on .*: the disk is full"),
    ]
    for fault, expected, words in faults:
        await head.open()
        over = asyncio.create_task(membership.over())
        await asyncio.sleep(0)
        await head.end(fault)
        async with asyncio.timeout(DEADLINE_S):
            if expected is None:
                await over
            else:
                with pytest.raises(expected, match=words):
                    await over


async def test_what_a_machine_does_before_it_works_is_given_up_when_the_run_is_over(
    bus: Bus, publisher: Publisher
) -> None:
    made = config(bus.run)
    head, membership = Head(made, bus, publisher, ""), Membership(made, MACHINE, bus, publisher)
    await head.open()
    assert await membership.unless_over(asyncio.sleep(0))
    given_up = asyncio.create_task(membership.unless_over(asyncio.sleep(600)))
    await asyncio.sleep(0)
    await head.end(None)
    async with asyncio.timeout(DEADLINE_S):
        assert not await given_up


async def test_a_head_that_is_away_for_too_long_ends_its_machines(bus: Bus, publisher: Publisher) -> None:
    made = config(bus.run, orphan_s=0.2)
    await Head(made, bus, publisher, "").open()
    await head_is_there(bus, publisher)
    over = asyncio.create_task(Membership(made, MACHINE, bus, publisher).over())
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(over), 0.45)
        await announce(bus, publisher, msgspec.structs.replace(beat("supervisor", INSTANCE, GONE), sequence=3))
        with pytest.raises(HeadEndedError, match=r"no head of run .* for 0\.2 s \(run\.orphan_timeout_s\)"):
            await over


async def test_an_actor_is_claimed_by_its_own_machines_supervisor(bus: Bus, publisher: Publisher) -> None:
    await head_is_there(bus, publisher)
    async with Roster(bus, "supervisor").open() as supervisors, asyncio.timeout(DEADLINE_S):
        began = time.monotonic()
        await until_alone(supervisors, f"supervisor-{MACHINE}", 0.15)
        assert time.monotonic() - began >= 0.15
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(until_alone(supervisors, INSTANCE, 0.15), 0.35)


async def test_an_actor_whose_supervisor_is_gone_ends_with_the_run_and_not_before(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphanhood, "EXPIRY_S", 0.1)
    made = config(bus.run)
    head = Head(made, bus, publisher, "")
    await head.open()
    await head_is_there(bus, publisher)
    mine = beat("supervisor", f"supervisor-{MACHINE}")
    await announce(bus, publisher, mine)
    context: Any = SimpleNamespace(
        bus=bus,
        config=made,
        identity=Identity(bus.run, "rollout", "rollout-1"),
        run_register=lambda kind: Register(bus, publisher, "run", kind),
    )
    orphaned = asyncio.create_task(orphanhood.until_orphaned(context))
    async with asyncio.timeout(DEADLINE_S):
        await head.end(None)
        with pytest.raises(TimeoutError):  # its supervisor is there, and drains it
            await asyncio.wait_for(asyncio.shield(orphaned), 0.3)
        await head.open()
        await announce(bus, publisher, msgspec.structs.replace(mine, state=GONE, sequence=2))
        with pytest.raises(TimeoutError):  # the run goes on, and another supervisor may come
            await asyncio.wait_for(asyncio.shield(orphaned), 0.3)
        await head.end(None)
        assert "the head has ended the run" in await orphaned


async def test_the_head_waits_for_machines_and_their_actors_to_leave(bus: Bus, publisher: Publisher) -> None:
    head = Head(config(bus.run), bus, publisher, "")
    for one in (beat("supervisor", INSTANCE), beat("supervisor", "supervisor-gpu-1"), beat("rollout", "rollout-1")):
        await announce(bus, publisher, one)
    async with Roster(bus).open() as roster:
        waiting = asyncio.create_task(head.until_alone(roster, asyncio.Event()))
        for role, instance in (("supervisor", "supervisor-gpu-1"), ("rollout", "rollout-1")):
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await announce(bus, publisher, msgspec.structs.replace(beat(role, instance, GONE), sequence=2))
        async with asyncio.timeout(DEADLINE_S):
            await waiting
        at_once = asyncio.Event()
        at_once.set()
        await announce(bus, publisher, msgspec.structs.replace(beat("rollout", "rollout-0"), sequence=2))
        async with asyncio.timeout(2.0):
            await head.until_alone(roster, at_once)


def opened(made: RootConfig, **changes: Any) -> states.Assembly:
    values: dict[str, Any] = {
        "layout": LAYOUT,
        "configuration": portable(made),
        "sources": sources_of(made),
        "host": "far",
        "address": "10.0.0.1",
    }
    return states.Assembly(phase="open", reason="", at=0.0, **{**values, **changes})


async def test_who_cannot_be_a_part_of_the_run_is_told_why(bus: Bus, publisher: Publisher) -> None:
    made = config(bus.run)
    membership = Membership(made, MACHINE, bus, publisher)
    membership.refuse_unlike(opened(made), "10.0.0.2")
    membership.refuse_unlike(opened(made, host=socket.gethostname(), address="127.0.0.1"), "127.0.0.1")
    other = config(bus.run, stop={"steps": 2}, rollout={"count": 2, "slots": 3})
    refused: list[tuple[states.Assembly, str, type[Exception], str]] = [
        (opened(other), "10.0.0.2", MachineRefusedError, r"run .* on far: `rollout\.slots`, `stop\.steps` differ"),
        (opened(made, layout="1"), "10.0.0.2", VersionError, "writes layout '1'"),
        (
            opened(made, address="127.0.1.1"),
            "10.0.0.2",
            MachineRefusedError,
            rf"head \(far\) announces .*Set {VARIABLE} on far",
        ),
        (
            opened(made),
            "127.0.0.1",
            MachineRefusedError,
            rf"{MACHINE} \({socket.gethostname()}\) announces 127\.0\.0\.1",
        ),
    ]
    for record, address, kind, words in refused:
        with pytest.raises(kind, match=words):
            membership.refuse_unlike(record, address)


async def test_a_machine_with_other_sources_of_a_hook_is_refused_by_its_name(
    bus: Bus, publisher: Publisher, tmp_path: Path
) -> None:
    """The same configuration, the same name of the file, another content."""
    both = []
    for place, text in (("head", "x = 1\n"), ("gpu", "x = 2\n")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.py").write_text(text)
        both.append(config(bus.run, rollout={"count": 2, "generate": f"{tmp_path / place / 'mine.py'}:generate"}))
    membership = Membership(both[1], MACHINE, bus, publisher)
    with pytest.raises(
        MachineRefusedError, match=r"machine gpu-1 has other sources of mine\.py:generate than the head"
    ):
        membership.refuse_unlike(opened(both[0]), "10.0.0.2")
    (tmp_path / "gpu" / "mine.py").write_text("x = 1\n")
    membership.refuse_unlike(opened(both[0]), "10.0.0.2")


async def test_a_machines_name_is_one_supervisors(bus: Bus, publisher: Publisher) -> None:
    leases = Register(bus, publisher, "lease", LeaseRecord)
    parent = ProcessIdentity(own().space, os.getppid(), started_s(os.getppid()) or 0.0)
    await leases.put(LeaseRecord("supervisor-gpu-1 on far", 1, time.time(), parent), f"machine-{MACHINE}", ttl_s=10)
    with pytest.raises(MachineHeldError, match=r"machine gpu-1 of run .* is taken by supervisor-gpu-1 on far"):
        async with MachineLease(bus, publisher, MACHINE).held():
            pass
    dead = ProcessIdentity(own().space, 2**22 + 1, 1.0)
    await leases.put(LeaseRecord("supervisor-gpu-1 on here", 1, time.time(), dead), f"machine-{MACHINE}", ttl_s=10)
    async with asyncio.timeout(DEADLINE_S):
        async with MachineLease(bus, publisher, MACHINE).held():
            held = (await leases.get(f"machine-{MACHINE}")).value
            assert held is not None and held.process == own()
        assert (await leases.get(f"machine-{MACHINE}")).value is None, "it is given up at the end"


async def test_a_second_head_is_refused_and_ends_no_machine(bus: Bus, publisher: Publisher) -> None:
    """`up` without --machine on one host of many made another head there, and its end was told as the end of the run."""
    made = config(bus.run)
    leases = Register(bus, publisher, "lease", LeaseRecord)
    parent = ProcessIdentity(own().space, os.getppid(), started_s(os.getppid()) or 0.0)
    await leases.put(LeaseRecord("supervisor-0 on far", 1, time.time(), parent), f"machine-{HEAD}", ttl_s=10)
    await Head(made, bus, publisher, "10.0.0.1").open()
    second = Head(made, bus, publisher, "10.0.0.2")
    with pytest.raises(MachineHeldError, match=r"is led by supervisor-0 on far.*\(--machine\)") as refused:
        async with MachineLease(bus, publisher, HEAD).held():
            pass
    await second.end(refused.value)
    await second.until_alone(Roster(bus), asyncio.Event())
    assert (await Membership(made, MACHINE, bus, publisher).opened()).address == "10.0.0.1"


async def test_a_lease_that_was_lost_is_taken_again_unless_another_has_it(bus: Bus, publisher: Publisher) -> None:
    """As after a bus that was away for longer than a lease lasts."""
    leases = Register(bus, publisher, "lease", LeaseRecord)
    lease = MachineLease(bus, publisher, MACHINE)
    async with asyncio.timeout(DEADLINE_S), lease.held():
        keeping = asyncio.create_task(lease.keep())
        first = lease._lease
        assert first is not None
        await first.release()
        lease._lost.set()
        async with leases.watch(f"machine-{MACHINE}") as changed:
            while (record := (await leases.get(f"machine-{MACHINE}")).value) is None or lease._lease is first:
                await changed.wait()
                changed.clear()
        assert record.process == own() and not keeping.done()
        assert lease._lease is not None
        await lease._lease.release()
        parent = ProcessIdentity(own().space, os.getppid(), started_s(os.getppid()) or 0.0)
        await leases.put(LeaseRecord("supervisor-gpu-1 on far", 9, time.time(), parent), f"machine-{MACHINE}", ttl_s=10)
        lease._lost.set()
        with pytest.raises(MachineHeldError, match="is taken by supervisor-gpu-1 on far"):
            await keeping


async def test_a_run_on_one_machine_is_told_nothing(bus: Bus, publisher: Publisher) -> None:
    alone = config(bus.run, machines={})
    head = Head(alone, bus, publisher, None)
    await head.open()
    await head.end(None)
    async with Roster(bus).open() as roster:
        await announce(bus, publisher, beat("supervisor", "supervisor-gpu-1"))
        await head.until_alone(roster, asyncio.Event())
    assert (await Register(bus, publisher, "run", states.Assembly).get(states.ASSEMBLY)).value is None
