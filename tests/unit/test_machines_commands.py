"""What commands know of machines: which one this is, which are there, and where a part of a run lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from physarum.actors.actorctl import machine, target
from physarum.actors.context import RunFolder
from physarum.actors.display.machines import machine_rows, machines_text
from physarum.actors.supervising import INSTANCE, supervisor_of, supervisor_on
from physarum.actors.supervisor.errors import NotRunningError
from physarum.actors.supervisor.stop import StopRequest
from physarum.actors.supervisor.verbs import last_lines, supervisor_verbs
from physarum.bus.presence import Heartbeat
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.root import RootConfig

VALUES: dict[str, Any] = {
    "run": {"name": "r"},
    "bus": {"url": "nats://bus:4222"},
    "checkpoint": {"token_env": "TOKEN"},
    "machines": {"gpu": {"count": 10, "rollout": 1}},
    "model": {"path": "m"},
    "source": {"hook": "a:b"},
    "trainer": {"objective": "sft", "lr": 1e-3},
    "stop": {"steps": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> RootConfig:
    values = {**VALUES, "run": {"name": "r", "root": str(tmp_path / "runs")}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
    return resolve(tmp_path / "c.yaml")


def test_a_host_is_the_machine_that_it_is_told_to_be(config: RootConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.VARIABLE, raising=False)
    assert machine.chosen(config, None) == "head" and machine.chosen(config, "gpu-3") == "gpu-3"
    monkeypatch.setenv(machine.VARIABLE, "gpu-4")
    assert machine.chosen(config, None) == "gpu-4" and machine.chosen(config, "head") == "head"
    with pytest.raises(
        ConfigError, match=r"--machine: found machine 'gpu-10'; expected one of head, gpu-0, .* \(11 in all\)"
    ):
        machine.chosen(config, "gpu-10")
    monkeypatch.setenv(machine.VARIABLE, "gpu3")
    with pytest.raises(ConfigError, match=rf"{machine.VARIABLE}: found machine 'gpu3'.*write gpu-3"):
        machine.chosen(config, None)


def test_each_actor_is_claimed_by_the_supervisor_of_its_machine(config: RootConfig) -> None:
    assert supervisor_of(config, "rollout", "rollout-2") == "supervisor-gpu-2" == supervisor_on("gpu-2")
    assert supervisor_of(config, "trainer", "trainer-0") == INSTANCE == supervisor_on(None)
    alone = config.model_copy(update={"machines": {}})
    assert supervisor_of(alone, "rollout", "rollout-2") == INSTANCE


def test_machines_are_shown_as_they_are_there(config: RootConfig) -> None:
    beats = [
        Heartbeat(
            role="supervisor", instance=name, state="ready", pid=1, host=host, started_at=1.0, sequence=1,
            facts={"address": "10.0.0.9"},
        )
        for name, host in ((INSTANCE, "node1"), ("supervisor-gpu-1", "node2"))
    ]  # fmt: skip
    rows = machine_rows(config, beats)
    assert rows[2] == {"machine": "gpu-1", "state": "ready", "host": "node2", "address": "10.0.0.9", "pid": 1}
    assert machines_text(rows) == (
        "head (node1), gpu-1 (node2); absent: gpu-0, gpu-2, gpu-3, gpu-4, gpu-5, gpu-6, gpu-7, gpu-8 and 1 more"
    )
    assert machines_text(machine_rows(config, [])).startswith("absent: head, gpu-0")
    assert machine_rows(config.model_copy(update={"machines": {}}), beats) == [] and machines_text([]) == ""


def test_a_part_of_a_run_lies_beside_the_runs_own_folder_and_is_found_by_the_runs_name(
    config: RootConfig, tmp_path: Path
) -> None:
    own, part = config.run.folder_on("head"), config.run.folder_on("gpu-2")
    assert (own, part) == (tmp_path / "runs" / "r", tmp_path / "runs" / "r@gpu-2")
    assert RunFolder(part).run == RunFolder(own).run == "r"
    with pytest.raises(NotRunningError, match="no run 'r'"):
        target.find("r", tmp_path / "runs")
    part.mkdir(parents=True)
    (part / "config.yaml").write_text("")
    assert target.find_part("r", tmp_path / "runs").path == target.find_part("r@gpu-2", tmp_path / "runs").path == part
    with pytest.raises(NotRunningError, match="is one machine's part of run r, .* give it on the head"):
        target.find("r", tmp_path / "runs")
    own.mkdir()
    (own / "config.yaml").write_text("")
    assert target.find("r", tmp_path / "runs").path == target.find_part("r", tmp_path / "runs").path == own


async def test_a_supervisor_gives_the_ends_of_its_logs_and_no_more_than_a_message_holds(
    config: RootConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    (folder.logs / "rollout-0.log").write_text("one\ntwo\nthree\n")
    (folder.logs / "reward-0.log").write_text("x" * (2 << 20))
    assert last_lines(folder, "rollout-0", 2) == {"rollout-0": "two\nthree"}
    assert last_lines(folder, "rollout-0", 2, "two") == {"rollout-0": "***\nthree"}
    everything = last_lines(folder, None, 20)
    assert set(everything) == {"rollout-0", "reward-0"} and sum(map(len, everything.values())) <= 512 << 10
    with pytest.raises(ValueError, match=r"no log of '\.\./x' here; there are: reward-0, rollout-0"):
        last_lines(folder, "../x", 2)
    monkeypatch.setenv("TOKEN", "a token")
    stop = StopRequest()
    verbs = supervisor_verbs(config, folder, stop)
    assert (await verbs["status"]({}))["stopping"] is False
    assert (await verbs["down"]({"now": True}))["stopping"] and stop.at_once.is_set()
