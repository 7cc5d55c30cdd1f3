"""Which machine has which actor: computed from the configuration alone, so that every machine finds the same.

A group's actors are dealt in the order of `machines:`, the head first: each machine has the next so many of them. Actors beyond
those that are configured (`actorctl scale`) are dealt one by one, in the same order, to the machines that have the group.

Invariant: each actor is on exactly one machine, and a machine that is added behind the others moves none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final, NamedTuple

from physarum.configs.machines import HEAD, MachineConfig, names_of
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig

ENGINES: Final = "engines"
_NODE: Final = "-node-"


class Slot(NamedTuple):
    """One process of a group: actor `number`, of an engine over nodes the one of `rank`."""

    number: int
    rank: int = 0


def machine_names(config: RootConfig) -> tuple[str, ...]:
    """Every machine of the run, the head first."""
    entries = {HEAD: MachineConfig(), **config.machines}
    return tuple(name for entry, machine in entries.items() for name in names_of(entry, machine))


def group_keys(config: RootConfig) -> list[KeyPath]:
    """The groups that machines may name."""
    return [("rollout",), ("reward",), *((ENGINES, name) for name in config.engines)]


def share(machine: MachineConfig, key: KeyPath) -> int | None:
    """How many processes of a group one of these machines has; None where it does not name it."""
    if key[0] == ENGINES:
        return machine.engines.get(str(key[1]))
    named: int | None = getattr(machine, str(key[0]))
    return named


def slots(config: RootConfig, key: KeyPath) -> list[Slot]:
    """The configured processes of a group, in the order in which they are dealt."""
    if key[0] != ENGINES:
        return [Slot(number) for number in range(getattr(config, str(key[0])).count)]
    group = config.engines[str(key[1])]
    return [Slot(number, rank) for number in range(group.instances) for rank in range(group.nodes_of(number))]


def dealt(config: RootConfig, key: KeyPath) -> dict[Slot, str]:
    """The machine of each configured process of a group. Too few machines leave the last processes to the head: a rule refuses
    it."""
    seats = list(_seats(config, key))
    return {slot: seats[place] if place < len(seats) else HEAD for place, slot in enumerate(slots(config, key))}


def machine_of(config: RootConfig, role: str, instance: str) -> str:
    """Where an actor runs, also one that the configuration does not have."""
    found = _slot(config, role, instance) if config.machines else None
    if found is None:
        return HEAD
    key, slot = found
    placed = _dealt(config, key)
    return placed[slot] if slot in placed else _beyond(config, key, slot)


def local_slots(config: RootConfig, key: KeyPath, machine: str | None) -> list[Slot]:
    """The configured processes of a group on one machine (None: the only one), in order."""
    if machine is None:
        return slots(config, key)
    return [slot for slot, place in _dealt(config, key).items() if place == machine]


def reduced(config: RootConfig, machine: str) -> RootConfig:
    """What of the engines' groups concerns one machine: those of which it has some."""
    if not config.machines:
        return config
    here = {name: one for name, one in config.engines.items() if local_slots(config, (ENGINES, name), machine)}
    return config.model_copy(update={"engines": here}).with_origins(config.origins)


def _seats(config: RootConfig, key: KeyPath) -> Iterator[str]:
    """A machine's name for each process that it may take, in the order of dealing."""
    entries = {HEAD: MachineConfig(), **config.machines}
    if all(share(machine, key) is None for machine in entries.values()):
        return
    for entry, machine in entries.items():
        for name in names_of(entry, machine):
            yield from [name] * (share(machine, key) or 0)


def _beyond(config: RootConfig, key: KeyPath, slot: Slot) -> str:
    """As an actor of the group that is configured, each of their places in turn."""
    units, places = _places(_Asked(config, key), slot.rank)
    return places[(slot.number - units) % len(places)][slot.rank] if places else HEAD


def _slot(config: RootConfig, role: str, instance: str) -> tuple[KeyPath, Slot] | None:
    """None for roles that only the head has."""
    engine, _, rank = instance.rpartition(_NODE) if role == "node" else (instance, "", "0")
    group, _, number = engine.rpartition("-")
    if role in ("engine", "node") and group in config.engines:
        return (ENGINES, group), Slot(int(number), int(rank))
    return ((role,), Slot(int(number))) if role in ("rollout", "reward") else None


def _dealt(config: RootConfig, key: KeyPath) -> dict[Slot, str]:
    """Remembered for the last configurations: thousands of actors are asked for one by one."""
    return _remembered(_Asked(config, key))


class _Asked:
    """By the identity of a configuration, which is frozen."""

    def __init__(self, config: RootConfig, key: KeyPath) -> None:
        self.config, self.key = config, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and (self.config is other.config and self.key == other.key)

    def __hash__(self) -> int:
        return hash((id(self.config), self.key))


@functools.lru_cache(maxsize=64)
def _remembered(asked: _Asked) -> dict[Slot, str]:
    return dealt(asked.config, asked.key)


@functools.lru_cache(maxsize=64)
def _places(asked: _Asked, rank: int) -> tuple[int, list[tuple[str, ...]]]:
    """How many actors are configured, and the different places that they have, of those over more than `rank` nodes."""
    units: dict[int, tuple[str, ...]] = {}
    for one, name in _remembered(asked).items():
        units[one.number] = (*units.get(one.number, ()), name)
    return len(units), [unit for unit in dict.fromkeys(units.values()) if len(unit) > rank]
