"""A run over two machines: the second one has the engines, the rollout and the reward actors, is killed with everything on it,
and the run goes on when it comes back.

Two supervisors with roots of their own on this host and one NATS server that is neither's; every actor is the real one, but for
SGLang's stub. The second machine has neither the start model nor a folder in common with the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from bus_fixture import OwnServer

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_lock import holder
from physarum.bus.connection import Bus
from physarum.bus.presence import Roster
from tests.bench.chaos import RECIPE
from tests.bench.chaos_check import Journal, wrong_tokens
from tests.bench.chaos_run import SUPERVISOR, ChaosRun, stub_overrides
from tests.bench.chaos_watch import Watch
from tests.bench.processes import environment

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(300)]

NAME, MACHINE, TOKEN = "two", "gpu-0", "PHYSARUM_TEST_TOKEN"
STEPS = 40
HERE = ("policy-0", "policy-1", "rollout-0", "rollout-1", "reward-0")


def write(folder: Path, url: str) -> Path:
    machines = {"gpu": {"count": 1, "engines": {"policy": 2}, "rollout": 2, "reward": 1}}
    values: dict[str, Any] = {
        "extends": str(RECIPE),
        "machines": machines,
        "bus": {"url": url},
        "checkpoint": {"token_env": TOKEN},
    }
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class MachineRun(ChaosRun):
    """The second machine's part. It is killed as a host is: all at once, and nobody is told."""

    def __init__(self, recipe: Path, root: Path, overrides: list[str]) -> None:
        super().__init__(recipe, root, NAME, overrides)
        self.folder = RunFolder(root / f"{NAME}@{MACHINE}")
        self._command += ["--machine", MACHINE]

    def lose(self) -> list[int]:
        """The processes that it was."""
        found = [self.pid(SUPERVISOR), *(record.pid for record in read_records(self.folder.actors) if record.alive)]
        family = [psutil.Process(pid) for pid in found if pid]
        family += [child for one in family for child in one.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, timeout=20)
        return [process.pid for process in family]

    def actors(self) -> dict[str, int]:
        return {record.instance: record.pid for record in read_records(self.folder.actors) if record.alive}


def actorctl(place: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "physarum.actors.actorctl", *arguments],
        cwd=place, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Pair:
    """Head and machine, on the bus that is neither's."""

    def __init__(self, place: Path, url: str, steps: int) -> None:
        self.journal_path = place / "journal"
        step_ms = "engines.policy.sglang.stub-step-ms=30"
        options = [*stub_overrides(self.journal_path), f"stop.steps={steps}", step_ms]
        self.roots = (place / "head", place / "gpu")
        for folder in self.roots:
            folder.mkdir()
        self.head = ChaosRun(write(self.roots[0], url), self.roots[0], NAME, options)
        self.machine = MachineRun(write(self.roots[1], url), self.roots[1], options)

    def stop(self) -> None:
        self.machine.stop()
        self.head.stop()

    def actorctl(self, *arguments: str) -> str:
        """As a user calls it on the head."""
        return actorctl(self.roots[0], *arguments, "--root", str(self.roots[0]))


@pytest.fixture
def pair(tmp_path: Path, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv(TOKEN, "correct-horse")
    made = Pair(tmp_path, own_server.url, STEPS)
    try:
        yield made
    finally:
        made.stop()


async def test_a_machine_is_killed_with_everything_on_it_and_the_run_goes_on_when_it_is_back(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, machine = pair.head, pair.machine
    await head.up()
    bus = await head.connect()
    try:
        watch = Watch(bus, Roster(bus))
        async with watch.open():
            monkeypatch.setenv("PHYSARUM_CACHE", str(tmp_path / "cache of the machine"))
            await machine.up()
            assert set(machine.actors()) == set(HERE)
            assert not {*HERE} & {record.instance for record in read_records(head.folder.actors)}
            assert json.loads((machine.folder.path / "start_model.json").read_text())["origin"] == "head"
            await watch.until_number(3, 120)
            machine.kill(SUPERVISOR)
            before = machine.actors()
            await machine.up()
            assert machine.actors() == before, "they are adopted"
            await watch.until_number(5, 120)
            lost = machine.lose()
            assert len(lost) > len(HERE) and not machine.actors()
            await until_unannounced(bus)
            assert head.pid(SUPERVISOR)
            await machine.up()
            await watch.until_number(STEPS, 150)
            executions = list(watch.executions)
    finally:
        await bus.close()
    summary = await head.ended()
    await until_gone(machine)
    journal = Journal(pair.journal_path)
    journal.read_on()
    account = summary["account"]
    assert (account["imbalance"], account["dead"], account["double_trained"]) == (0, 0, 0)
    assert executions and sum(wrong_tokens(one, journal) for one in executions) == 0
    assert not machine.folder.summary.exists()


async def test_commands_on_the_head_reach_every_machine(pair: Pair) -> None:
    head, machine = pair.head, pair.machine
    await head.up()
    absent = {"machine": MACHINE, "state": "absent", "host": None, "address": None, "pid": None}
    assert json.loads(pair.actorctl("ps", NAME, "--json"))["machines"][1] == absent
    await machine.up()
    bus = await head.connect()
    try:
        async with Roster(bus).open() as roster:
            pair.actorctl("scale", NAME, "rollout=+1")
            await until(roster, lambda there: "rollout-2" in there)
            assert "rollout-2" in machine.actors()
            state = json.loads(pair.actorctl("ps", NAME, "--json"))
            places = {actor["instance"]: actor["machine"] for actor in state["actors"]}
            assert places == {
                **dict.fromkeys((*HERE, "rollout-2"), MACHINE),
                **dict.fromkeys(places.keys() - {*HERE, "rollout-2"}, "head"),
            }
            assert [row["state"] for row in state["machines"]] == ["ready", "ready"]
            text = pair.actorctl("logs", NAME, "rollout-2", "-n", "100")
            assert "two/rollout/rollout-2" in text
            pair.actorctl("drain", NAME, "rollout-2")
            await until(roster, lambda there: "rollout-2" not in there)
            pair.actorctl("down", NAME, "--machine", MACHINE)
            assert not machine.actors() and head.pid(SUPERVISOR)
            await machine.up()
            await until(roster, lambda there: {*HERE} <= there)
            assert "machines head (" in pair.actorctl("ps", NAME)
            pair.actorctl("down", NAME)
            await until_gone(machine)
            assert not head.pid(SUPERVISOR)
    finally:
        await bus.close()
    account = json.loads(pair.actorctl("ledger", NAME, "--json"))
    assert account["imbalance"] == 0


async def until(roster: Roster, satisfied: Callable[[set[str]], bool]) -> None:
    async with asyncio.timeout(60):
        while not satisfied({beat.instance for beat in roster.members}):
            await roster.wait_change(10)


async def until_unannounced(bus: Bus) -> None:
    """Its presence has expired: nobody counts on it any more."""
    async with Roster(bus).open() as roster:
        await until(roster, lambda there: not there & {*HERE, f"supervisor-{MACHINE}"})


async def until_gone(machine: MachineRun) -> None:
    """Its supervisor ends by the head's word."""
    found = holder(machine.folder.path)
    if found is not None:
        await asyncio.to_thread(psutil.Process(found.pid).wait, 60)
    assert not machine.actors()
    assert os.environ[TOKEN] not in (machine.folder.logs / "supervisor.log").read_text()
