"""How an actor's process is made: its command, its environment, its devices and the processors beside them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import psutil

from physarum.actors.address import VARIABLE as ADDRESS
from physarum.actors.context import RunFolder
from physarum.actors.engine.nodes import engine_of
from physarum.actors.policies import policy_of
from physarum.actors.supervisor import numa
from physarum.actors.supervisor.process import ActorProcess, ActorRecord, read_records
from physarum.configs.devices import assign_devices, local_part, present_devices
from physarum.configs.machines import HEAD
from physarum.configs.origin import dotted
from physarum.configs.placement import Slot, local_slots
from physarum.configs.root import RootConfig

CommandFor: TypeAlias = Callable[[RunFolder, str, str], Sequence[str]]
"""(folder, role, instance) -> the command line of that actor."""

_DEFAULTS: Final = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Many processes share the processors: one thread each, unless the user's environment or the role's `env` says more."""


def actor_command(folder: RunFolder, role: str, instance: str) -> list[str]:
    return [sys.executable, "-m", "physarum.actors.main", str(folder.path), role, instance]


class Launcher:
    """Starts and adopts the actors of one run. Raises ConfigError when more devices are asked for than there are."""

    def __init__(
        self,
        config: RootConfig,
        folder: RunFolder,
        command_for: CommandFor = actor_command,
        machine: str = HEAD,
        address: str | None = None,
    ) -> None:
        """`address`: at which other machines reach this one (None: nobody does)."""
        self._config, self._address = config, address
        self._machine = machine if config.machines else None
        self._folder = folder
        self._command_for = command_for
        self._present = present_devices()
        self._devices = assign_devices(config, self._present, self._machine)
        self._running = {record.instance: record for record in read_records(folder.actors)}

    def adopt(self, instance: str) -> ActorProcess | None:
        """The process that an earlier supervisor left running, if any."""
        record = self._running.pop(instance, None)
        return None if record is None else ActorProcess.adopt(record)

    def left_running(self) -> list[tuple[str, str]]:
        """(Role, instance) of what an earlier supervisor left and nobody has adopted."""
        return [(record.role, record.instance) for record in self._running.values() if record.alive]

    def start(self, role: str, instance: str, restarts: int) -> ActorProcess:
        gpus = self.gpus(role, instance)
        blank = ActorRecord(
            role=role,
            instance=instance,
            pid=0,
            started_at=0.0,
            restarts=restarts,
            gpus=gpus,
            log=str(self._folder.logs / f"{instance}.log"),
            log_start=0,
        )
        command = self._command_for(self._folder, role, instance)
        process = ActorProcess.start(command, self.environment(role, instance), blank, self._folder.actors)
        if cpus := numa.cpus_near([self._present.name(gpu) for gpu in gpus]):
            _bind(process.record.pid, cpus)
        return process

    def gpus(self, role: str, instance: str) -> tuple[int, ...]:
        """The instance's part of its group's devices: an equal share, or one shared with others when they are fewer."""
        name, number, count = _share(self._config, self._machine, role, instance)
        held = self._devices.get(name, ())
        if not held:
            return ()
        if len(held) < count:
            return (held[number % len(held)],)
        share, more = divmod(len(held), count)
        start = number * share + min(number, more)
        return held[start : start + share + (number < more)]

    def environment(self, role: str, instance: str) -> dict[str, str]:
        """Ours, then the role's `env`, which wins. A role that asked for no device sees none."""
        visible = ",".join(self._present.name(gpu) for gpu in self.gpus(role, instance))
        ours = {"CUDA_VISIBLE_DEVICES": visible, "PYTHONUNBUFFERED": "1"}
        if self._address is not None:
            ours[ADDRESS] = self._address
        return {**_DEFAULTS, **os.environ, **ours, **_user_variables(self._config, role, instance)}


def _share(config: RootConfig, machine: str | None, role: str, instance: str) -> tuple[str, int, int]:
    """The name under which `assign_devices` lists the devices of which an actor has a share; its number among how many of the
    machine."""
    number = int(instance.rpartition("-")[2])
    match role:
        case "engine":
            return _node_share(config, machine, instance, 0)
        case "node":
            return _node_share(config, machine, *engine_of(instance))
        case "rollout" | "reward":
            return role, *_place(local_slots(config, (role,), machine), Slot(number))
        case "trainer":
            return dotted((*config.of_policy(policy_of(config, role, instance)).under, role)), number, 1
        case _:
            return role, number, 1


def _node_share(config: RootConfig, machine: str | None, engine: str, rank: int) -> tuple[str, int, int]:
    """Nodes share the devices of their part as so many engines would."""
    group, _, number = engine.rpartition("-")
    settings = config.engines[group]
    part = settings.place(int(number)).part
    name = f"engines.{group}" + (f".servers.{part}" if settings.servers else "")
    return name, *_place(local_part(config, group, part, machine), Slot(int(number), rank))


def _place(there: list[Slot], slot: Slot) -> tuple[int, int]:
    """Its number among how many; one that is not configured comes behind them, where there is no share."""
    return there.index(slot) if slot in there else len(there), max(1, len(there))


def _user_variables(config: RootConfig, role: str, instance: str) -> dict[str, str]:
    match role:
        case "engine" | "node":
            engine = instance if role == "engine" else engine_of(instance)[0]
            group, _, number = engine.rpartition("-")
            return config.engines[group].of_server(int(number)).env
        case "rollout":
            return config.rollout.env
        case "reward":
            return config.reward.env
        case "trainer":
            return config.of_policy(policy_of(config, role, instance)).trainer.env
        case _:
            return {}


def _bind(pid: int, cpus: set[int]) -> None:
    """Keeps a process (and what it starts later) on processors near its devices; it may have ended already."""
    try:
        process = psutil.Process(pid)
        allowed = cpus & set(process.cpu_affinity() or ())
        if allowed:
            process.cpu_affinity(sorted(allowed))
    except psutil.NoSuchProcess:
        return
