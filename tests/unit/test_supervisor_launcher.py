"""An actor's environment and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from physarum.actors.context import RunFolder
from physarum.actors.supervisor import launcher, numa
from physarum.actors.supervisor.launcher import Launcher
from physarum.configs.devices import PresentDevices
from physarum.configs.errors import ConfigError
from physarum.configs.root import RootConfig

BASE: dict[str, Any] = {
    "run": {"name": "r"},
    "model": {"path": "m"},
    "source": {"hook": "a:b"},
    "stop": {"steps": 1},
    "trainer": {"objective": "sft", "lr": 1e-3},
}


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, **sections: Any) -> Launcher:
    monkeypatch.setattr(launcher, "present_devices", lambda: PresentDevices(devices, f"{devices} for the test"))
    config = RootConfig.model_validate({**BASE, **sections}, strict=False)
    return Launcher(config, RunFolder(tmp_path))


def test_devices_are_shared_within_a_group_and_the_trainer_gets_all_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {"policy": {"count": 2, "gpus": 5}, "judge": {"count": 2, "gpus": 1}}
    trainer = {**BASE["trainer"], "gpus": 2, "ranks": 2}
    one = made(tmp_path, monkeypatch, 8, engines=engines, trainer=trainer)
    assert one.gpus("trainer", "trainer-0") == (0, 1)
    assert [one.gpus("engine", f"policy-{n}") for n in range(2)] == [(2, 3, 4), (5, 6)]
    assert [one.gpus("engine", f"judge-{n}") for n in range(2)] == [(7,), (7,)]
    assert one.gpus("source", "source-0") == ()


def test_indices_count_within_what_the_environment_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    present = PresentDevices(2, "two of four", ("3", "1"))
    monkeypatch.setattr(launcher, "present_devices", lambda: present)
    config = RootConfig.model_validate({**BASE, "trainer": {**BASE["trainer"], "gpus": [0]}}, strict=False)
    assert Launcher(config, RunFolder(tmp_path)).environment("trainer", "trainer-0")["CUDA_VISIBLE_DEVICES"] == "3"


def test_more_devices_than_there_are_is_refused_before_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="2 devices asked for"):
        made(tmp_path, monkeypatch, 1, trainer={**BASE["trainer"], "gpus": 2})


def test_the_roles_variables_win_and_a_role_without_devices_sees_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    trainer = {**BASE["trainer"], "env": {"OMP_NUM_THREADS": 4, "NCCL_DEBUG": "INFO"}}
    one = made(tmp_path, monkeypatch, 0, trainer=trainer)
    mine = one.environment("trainer", "trainer-0")
    assert (mine["OMP_NUM_THREADS"], mine["NCCL_DEBUG"], mine["CUDA_VISIBLE_DEVICES"]) == ("4", "INFO", "")
    assert one.environment("reward", "reward-0")["OMP_NUM_THREADS"] == "1"


def test_processors_near_a_device_come_from_the_kernels_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_addresses", lambda: {"0": "0000:1b:00.0", "1": "0000:9a:00.0"})
    for address, node in (("0000:1b:00.0", 0), ("0000:9a:00.0", 1)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{4 * node}-{4 * node + 1},{4 * node + 3}\n")
    assert numa.cpus_near(("1",), tmp_path, tmp_path) == {4, 5, 7}
    assert numa.cpus_near(("0", "1"), tmp_path, tmp_path) == {0, 1, 3, 4, 5, 7}
    assert numa.cpus_near((), tmp_path, tmp_path) == set()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("-1\n")  # one node only: the kernel does not say
    assert numa.cpus_near(("0",), tmp_path, tmp_path) == set()


def test_parts_and_nodes_have_devices_and_variables_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [
        {"role": "prefill", "count": 2, "gpus": 2, "env": {"A": "p"}},
        {"role": "placeholder", "gpus": 1},
        {"role": "decode", "count": 1, "nodes": 2, "gpus": 4},
    ]
    engines = {"policy": {"servers": parts, "env": {"A": "all"}}, "judge": {"nodes": 2, "gpus": 2, "model": "m"}}
    one = made(tmp_path, monkeypatch, 9, engines=engines)
    assert [one.gpus("engine", f"policy-{number}") for number in range(3)] == [(0,), (1,), (3, 4)]
    assert one.gpus("node", "policy-2-node-1") == (5, 6)
    assert (one.gpus("engine", "judge-0"), one.gpus("node", "judge-0-node-1")) == ((7,), (8,))
    assert one.environment("engine", "policy-1")["A"] == "p"
    assert one.environment("node", "policy-2-node-1")["A"] == "all"


def test_of_several_machines_each_shares_its_devices_among_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "present_devices", lambda: PresentDevices(4, "four"))
    monkeypatch.delenv("PHYSARUM_ADDRESS", raising=False)
    machines = {"gpu": {"count": 2, "engines": {"policy": 2}, "rollout": 1}}
    sections = {
        "machines": machines,
        "engines": {"policy": {"count": 4, "gpus": 4}},
        "rollout": {"count": 2, "gpus": 0},
    }
    trainer = {**BASE["trainer"], "gpus": 2, "ranks": 2}
    config = RootConfig.model_validate({**BASE, **sections, "trainer": trainer}, strict=False)
    head, second = (
        Launcher(config, RunFolder(tmp_path), machine=name, address="10.0.0.1") for name in ("head", "gpu-1")
    )
    assert head.gpus("trainer", "trainer-0") == (0, 1)
    assert [second.gpus("engine", f"policy-{number}") for number in (2, 3)] == [(0, 1), (2, 3)]
    assert second.gpus("engine", "policy-4") == (), "one that was added has no devices"
    assert second.environment("rollout", "rollout-1")["PHYSARUM_ADDRESS"] == "10.0.0.1"
    alone = RootConfig.model_validate(BASE, strict=False)
    assert "PHYSARUM_ADDRESS" not in Launcher(alone, RunFolder(tmp_path)).environment("trainer", "trainer-0")
