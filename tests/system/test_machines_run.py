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
GPU: dict[str, Any] = {"count": 1, "engines": {"policy": 2}, "rollout": 2, "reward": 1}
STEPS = 40
HERE = ("policy-0", "policy-1", "rollout-0", "rollout-1", "reward-0")


def write(folder: Path, url: str, gpu: dict[str, Any]) -> Path:
    values: dict[str, Any] = {
        "extends": str(RECIPE),
        "machines": {"gpu": gpu},
        "bus": {"url": url},
        "checkpoint": {"token_env": TOKEN},
    }
    path = folder / "two.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def lose(run: ChaosRun) -> list[int]:
    """A host is gone: all that was on it at once, and nobody is told. The processes that it were."""
    found = [run.pid(SUPERVISOR), *(record.pid for record in read_records(run.folder.actors) if record.alive)]
    family = [psutil.Process(pid) for pid in found if pid]
    family += [child for one in family for child in one.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=20)
    return [process.pid for process in family]


class MachineRun(ChaosRun):
    """A machine's part of the run."""

    def __init__(self, recipe: Path, root: Path, overrides: list[str], machine: str = MACHINE) -> None:
        super().__init__(recipe, root, NAME, overrides)
        self.folder = RunFolder(root / f"{NAME}@{machine}")
        self._command += ["--machine", machine]

    def share(self, root: Path) -> None:
        """Its part lies beside the head's folder."""
        self._command = [f"run.root={root}" if word.startswith("run.root=") else word for word in self._command]
        self.folder = RunFolder(root / self.folder.path.name)

    def actors(self) -> dict[str, int]:
        return {record.instance: record.pid for record in read_records(self.folder.actors) if record.alive}


def actorctl(place: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "physarum.actors.actorctl", *arguments],
        cwd=place, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Machines:
    """The head and its machines, on the bus that is nobody's of them."""

    def __init__(self, place: Path, url: str, gpu: dict[str, Any], *settings: str) -> None:
        self.journal_path = place / "journal"
        step_ms = "engines.policy.sglang.stub-step-ms=30"
        self.options = [*stub_overrides(self.journal_path), step_ms, *settings]
        self.root = place / "head"
        self.root.mkdir()
        self.head = ChaosRun(write(self.root, url, gpu), self.root, NAME, self.options)
        self.others = [self._machine(place / f"gpu-{rank}", url, gpu, f"gpu-{rank}") for rank in range(gpu["count"])]

    def _machine(self, root: Path, url: str, gpu: dict[str, Any], name: str) -> MachineRun:
        root.mkdir()
        return MachineRun(write(root, url, gpu), root, self.options, name)

    def stop(self) -> None:
        for one in (*self.others, self.head):
            one.stop()

    def actorctl(self, *arguments: str) -> str:
        """As a user calls it on the head."""
        return actorctl(self.root, *arguments, "--root", str(self.root))


@contextlib.contextmanager
def machines(place: Path, url: str, gpu: dict[str, Any], *settings: str) -> Iterator[Machines]:
    made = Machines(place, url, gpu, *settings)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def pair(tmp_path: Path, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv(TOKEN, "correct-horse")
    with machines(tmp_path, own_server.url, GPU, f"stop.steps={STEPS}") as made:
        yield made


async def test_each_machine_is_killed_with_everything_on_it_and_the_run_goes_on_when_it_is_back(
    pair: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, machine = pair.head, pair.others[0]
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
            lost = lose(machine)
            assert len(lost) > len(HERE) and not machine.actors()
            await until_unannounced(bus)
            assert head.pid(SUPERVISOR)
            await machine.up()
            await watch.until_number(watch.number + 3, 120)
            at = machine.actors()
            lose(head)
            await head.up()
            assert machine.actors() == at, "it works on"
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


async def test_commands_on_the_head_reach_every_machine_also_where_they_share_a_folder(pair: Machines) -> None:
    """Executions are above the limit of what goes inline: their bytes go to the head's store, from elsewhere by HTTP."""
    head, machine = pair.head, pair.others[0]
    machine.share(pair.root)
    for run in (head, machine):
        run.also("bus.inline_limit_bytes=600")
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
    assert account["imbalance"] == account["dead"] == 0 < account["trained"]
    assert list((head.folder.path / "blobs").glob("??/*")) and not (machine.folder.path / "blobs").exists()


async def test_nodes_of_an_engine_are_on_two_machines_and_one_that_is_lost_ends_the_engine_until_it_is_back(
    tmp_path: Path, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "correct-horse")
    gpu = {"count": 2, "engines": {"policy": 1}, "rollout": 1}
    nodes = ["engines.policy.nodes=2", "engines.policy.count=1", f"engines.policy.weights_folder={tmp_path}/shared"]
    with machines(tmp_path, own_server.url, gpu, *nodes, "stop.steps=16") as made:
        head, (first, second) = made.head, made.others
        await asyncio.gather(*(one.up() for one in (head, first, second)))
        assert set(first.actors()) == {"policy-0", "rollout-0"}
        assert set(second.actors()) == {"policy-0-node-1", "rollout-1"}
        bus = await head.connect()
        try:
            watch = Watch(bus, Roster(bus))
            async with watch.open():
                await watch.until_number(3, 120)
                before = first.pid("policy-0/server")
                lose(second)
                await second.up()
                await watch.until_number(16, 150)
        finally:
            await bus.close()
        summary = await head.ended()
        assert before
        for one in (first, second):
            await until_gone(one)
    assert (summary["account"]["imbalance"], summary["account"]["dead"]) == (0, 0)


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
