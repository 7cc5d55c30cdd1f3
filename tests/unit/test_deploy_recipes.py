"""The recipes for Slurm and Kubernetes start the commands that there are, with each machine's own name."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from physarum.actors import address
from physarum.bus.server import binary
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.placement import machine_names, machine_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RECIPE = ROOT / "configs" / "calculator_machines.yaml"

SRUN = """#!/usr/bin/env bash
# Each node's task, one after the other.
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1 2; do SLURM_NODEID=$node "$@"; done
"""
ACTORCTL = """#!/usr/bin/env bash
echo "$# $*" >> "$TOLD"
[ -n "$PHYSARUM_BUS_TOKEN" ] && [ -n "$PHYSARUM_WEIGHTS_TOKEN" ]
"""
NATS = """#!/usr/bin/env bash
echo "bus $*" >> "$TOLD"
exec sleep 60
"""


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_slurm_starts_the_same_command_with_each_nodes_name(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program(tmp_path, "srun", SRUN)
    program(tmp_path, "scontrol", "#!/bin/sh\necho node-7\necho node-8\n")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOLD": str(told),
        "SLURM_JOB_NODELIST": "node-[7-9]",
        "PHYSARUM_ACTORCTL": str(program(tmp_path, "actorctl", ACTORCTL)),
        "PHYSARUM_NATS": str(program(tmp_path, "nats", NATS)),
        "PHYSARUM_BUS_STORE": str(tmp_path / "store"),
    }
    command = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "run.yaml", "extra.text=two words"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=30)
    words = "up run.yaml extra.text=two words bus.url=nats://node-7:4222 --machine"
    lines = sorted(told.read_text().splitlines())
    assert lines == [*(f"6 {words} {name}" for name in ("gpu-0", "gpu-1", "head")), "bus -c deploy/nats/token.conf"]
    refused = subprocess.run(command[:2], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0 and "expected a configuration" in refused.stderr


def containers() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "train.yaml").read_text()))
    specs = [one["spec"]["template"]["spec"] for one in documents if "template" in one["spec"]]
    return {container["name"]: container for spec in specs for container in spec["containers"]}


def test_kubernetes_gives_each_pod_its_name_its_address_and_the_secrets() -> None:
    found = containers()
    assert found["head"]["command"][-2:] == ["--machine", "head"]
    assert '--machine "gpu-$JOB_COMPLETION_INDEX"' in found["gpu"]["command"][-1]
    for name in ("head", "gpu"):
        variables = {one["name"]: one["valueFrom"] for one in found[name]["env"]}
        assert variables[address.VARIABLE] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert {"PHYSARUM_BUS_TOKEN", "PHYSARUM_WEIGHTS_TOKEN"} <= variables.keys()
        mounted = {one["mountPath"] for one in found[name]["volumeMounts"]}
        assert mounted == {"/etc/physarum", "/runs", "/dev/shm"}
    asked = re.findall(r"\$(PHYSARUM_\w+)", (DEPLOY / "nats" / "token.conf").read_text())
    given = {one["name"] for one in found["nats"]["env"]}
    assert asked == ["PHYSARUM_BUS_TOKEN"] and given == {"PHYSARUM_BUS_STORE", "PHYSARUM_BUS_TOKEN"}


def test_the_bus_of_one_token_starts_with_its_two_variables_and_not_without(tmp_path: Path) -> None:
    command = [str(binary()), "-t", "-c", str(DEPLOY / "nats" / "token.conf")]
    environment = {"PATH": os.environ["PATH"], "PHYSARUM_BUS_STORE": str(tmp_path), "PHYSARUM_BUS_TOKEN": "t0ken"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
    del environment["PHYSARUM_BUS_TOKEN"]
    lacking = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert lacking.returncode != 0 and "PHYSARUM_BUS_TOKEN" in lacking.stderr


@pytest.mark.parametrize("words", [(), ("machines.gpu.count=16",)])
def test_the_example_has_as_many_machines_as_it_is_told(words: tuple[str, ...]) -> None:
    config = resolve(RECIPE, parse_command_line(words))
    count = 16 if words else 2
    assert machine_names(config) == ("head", *(f"gpu-{rank}" for rank in range(count)))
    assert machine_of(config, "engine", "policy-1") == machine_of(config, "rollout", "rollout-1") == "gpu-1"
    assert config.reward.count == count
