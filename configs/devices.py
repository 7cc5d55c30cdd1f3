"""Accelerators: how many a host has, and which group of a run holds which.

Invariant: a device belongs to at most one group (unless `run.share_gpus` lets groups list the same one), and a group gets
exactly what it asks for or the run is refused. Of several machines each that has some of a group gives it `gpus` devices.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from physarum.configs.errors import ConfigError, Problem, Severity
from physarum.configs.machines import HEAD
from physarum.configs.origin import KeyPath, dotted
from physarum.configs.placement import ENGINES, Slot, local_slots
from physarum.configs.root import RootConfig

_DETECTION_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A group that may hold devices: what its `gpus` asks for, the instances that share it, and its `env`."""

    gpus: int | tuple[int, ...]
    instances: int
    env: dict[str, str]

    @property
    def amount(self) -> int:
        """Devices of the whole group."""
        return self.gpus if isinstance(self.gpus, int) else len(self.gpus)


@dataclass(frozen=True, slots=True)
class PresentDevices:
    """How many devices we may use (`gpus` names them 0 to count - 1), and in words how that is known."""

    count: int
    evidence: str
    names: tuple[str, ...] | None = None
    """What the driver calls each, where CUDA_VISIBLE_DEVICES chose some; None: their indices."""

    def name(self, index: int) -> str:
        """The driver's name of device `index` of ours, as CUDA_VISIBLE_DEVICES takes it."""
        return str(index) if self.names is None else self.names[index]


def device_groups(config: RootConfig, machine: str | None = None) -> dict[KeyPath, DeviceGroup]:
    """Every group that may hold devices, by the key path of its section. External engines hold none of ours. `machine`: those
    with processes there, and how many (None: the run's only machine)."""
    groups: dict[KeyPath, DeviceGroup] = {}
    if machine in (None, HEAD):
        for view in config.views():
            trainer = view.trainer
            groups[*view.under, "trainer"] = DeviceGroup(trainer.gpus, trainer.ranks, trainer.env)
    for key, one in ((("rollout",), config.rollout), (("reward",), config.reward)):
        here = len(local_slots(config, key, machine))
        if here or machine is None:
            groups[key] = DeviceGroup(one.gpus, here, one.env)
    for name, engine in config.engines.items():
        here = len(local_slots(config, (ENGINES, name), machine))
        if engine.url is not None or (not here and machine is not None):
            continue
        if not engine.servers:
            groups[ENGINES, name] = DeviceGroup(engine.gpus, here, engine.env)
        for index, part in enumerate(engine.servers):
            count = len(local_part(config, name, index, machine))
            if count or machine is None or not part.started:
                env = {**engine.env, **part.env}
                groups[ENGINES, name, "servers", index] = DeviceGroup(part.gpus, count, env)
    return groups


def local_part(config: RootConfig, group: str, part: int, machine: str | None) -> list[Slot]:
    """The processes of one part of a group of engines on one machine."""
    found = local_slots(config, (ENGINES, group), machine)
    return [slot for slot in found if config.engines[group].place(slot.number).part == part]


def present_devices() -> PresentDevices:
    """Asks nvidia-smi, so that no process here loads CUDA. A host without it has no devices.

    Of those that it lists, only the ones that CUDA_VISIBLE_DEVICES names (indices or UUIDs) are ours, in its order.
    """
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_DETECTION_TIMEOUT_S, check=True)
    except FileNotFoundError:
        return PresentDevices(0, "nvidia-smi is not installed")
    except subprocess.CalledProcessError as error:
        return PresentDevices(0, f"nvidia-smi failed: {(error.stdout + error.stderr).strip()[:200]}")
    except subprocess.TimeoutExpired:
        return PresentDevices(0, f"nvidia-smi did not answer within {_DETECTION_TIMEOUT_S:.0f} s")
    count = len(answer.stdout.split())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return PresentDevices(count, f"nvidia-smi lists {count}") if chosen is None else _chosen(chosen, count)


def _chosen(names: str, count: int) -> PresentDevices:
    """As CUDA reads the variable: what follows the first index that does not exist is not there."""
    kept: list[str] = []
    for name in filter(None, (one.strip() for one in names.split(","))):
        if name.lstrip("-").isdigit() and not 0 <= int(name) < count:
            break
        kept.append(name)
    return PresentDevices(len(kept), f"CUDA_VISIBLE_DEVICES={names}, of {count}", tuple(kept))


def assign_devices(
    config: RootConfig, present: PresentDevices, machine: str | None = None
) -> dict[str, tuple[int, ...]]:
    """The device indices of each group (`trainer`, `engines.policy`) that asks for any on this machine.

    Listed indices are given first, counts then take the lowest free ones. Raises ConfigError when there are too few
    devices, a listed index does not exist, or two groups list the same one.
    """
    groups = {key: group for key, group in device_groups(config, machine).items() if group.amount}
    if problems := [*_too_many(config, groups, present), *_bad_indices(config, groups, present)]:
        raise ConfigError(problems)
    listed = {index for group in groups.values() if isinstance(group.gpus, tuple) for index in group.gpus}
    free = (index for index in range(present.count) if index not in listed)
    return {
        dotted(key): group.gpus if isinstance(group.gpus, tuple) else tuple(next(free) for _ in range(group.gpus))
        for key, group in groups.items()
    }


def _too_many(config: RootConfig, groups: dict[KeyPath, DeviceGroup], present: PresentDevices) -> list[Problem]:
    asked = sum(group.amount for group in groups.values())
    if config.run.share_gpus:
        listed = {index for group in groups.values() if isinstance(group.gpus, tuple) for index in group.gpus}
        asked = len(listed) + sum(group.gpus for group in groups.values() if isinstance(group.gpus, int))
    if asked <= present.count:
        return []
    shares = " + ".join(f"{group.amount} (`{dotted(key)}.gpus`)" for key, group in groups.items())
    where = ", ".join(config.origins.where((*key, "gpus")) for key in groups)
    remedy = f"lower `gpus` by {asked - present.count} in all, or start on a host with {asked} devices"
    expected = f"at most the {present.count} devices present ({present.evidence})"
    return [Problem(Severity.ERROR, where, f"{asked} devices asked for: {shares}", expected, remedy)]


def _bad_indices(config: RootConfig, groups: dict[KeyPath, DeviceGroup], present: PresentDevices) -> list[Problem]:
    problems: list[Problem] = []
    holders: dict[int, KeyPath] = {}
    for key, group in groups.items():
        for index in group.gpus if isinstance(group.gpus, tuple) else ():
            where = config.origins.where((*key, "gpus"))
            if index >= present.count:
                expected = f"an index below {present.count} ({present.evidence})"
                problems.append(Problem(Severity.ERROR, where, f"device {index}", expected, "list devices that exist"))
            elif (holder := holders.setdefault(index, key)) != key and not config.run.share_gpus:
                found = f"device {index} in `{dotted(holder)}.gpus` and in `{dotted(key)}.gpus`"
                remedy = "remove it from one, or let them share it with run.share_gpus: true"
                problems.append(Problem(Severity.ERROR, where, found, "one holder of a device", remedy))
    return problems
