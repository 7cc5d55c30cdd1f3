"""How many actors a group has: what the configuration says, or what `actorctl scale` and `drain` asked for since.

It is kept in the RUN register as the numbers of each group's instances, so that a supervisor which is started again finds it.
Only actors that come and go freely are scaled: nothing that leads by a lease, and no engine of somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from physarum.actors.engine.nodes import ROLE as NODE
from physarum.actors.roles import instances, nodes_of
from physarum.actors.states import Scaled
from physarum.actors.tools.errors import RunUnfitError
from physarum.configs.placement import machine_of
from physarum.configs.root import RootConfig
from physarum.configs.suggest import nearest

ROLES: Final = ("rollout", "reward")
"""Beside the groups of engines."""
MOST: Final = 10_000
_CHANGE: Final = re.compile(r"(?P<group>[^=]+)=(?P<sign>[+-]?)(?P<count>\d+)")

Numbers = tuple[int, ...]
"""Of a group's instances, in order: 0 and 2 are `rollout-0` and `rollout-2`."""


class Change(NamedTuple):
    """`count` actors of a group; with `relative`, so many more (or fewer) than there are."""

    group: str
    count: int
    relative: bool


def groups(config: RootConfig) -> dict[str, Numbers]:
    """The groups that can be scaled, with their numbers by the configuration."""
    started = [name for name, engine in config.engines.items() if engine.url is None]
    found: dict[str, list[int]] = {name: [] for name in (*ROLES, *started)}
    for role, instance in instances(config):
        name, _, number = instance.rpartition("-")
        if (role in ROLES or role == "engine") and name in found:
            found[name].append(int(number))
    return {name: tuple(numbers) for name, numbers in found.items()}


def role_of(group: str) -> str:
    """The role of a group's actors."""
    return group if group in ROLES else "engine"


def alike(config: RootConfig, role: str, one: str, other: str) -> bool:
    """Whether one actor of a role can stand in for another: workers, and engines of a group whose servers are equal."""
    group, _, _ = one.rpartition("-")
    if other.rpartition("-")[0] != group:
        return False
    return role in ROLES or (role == "engine" and not config.engines[group].servers)


def wanted(config: RootConfig, scaled: Scaled | None) -> dict[str, Numbers]:
    """The numbers of every group as they should be now."""
    asked = scaled.groups if scaled is not None else {}
    return {name: tuple(asked.get(name, numbers)) for name, numbers in groups(config).items()}


def gone(before: Mapping[str, Numbers], after: Mapping[str, Numbers]) -> set[str]:
    """Instances that are no longer wanted. A later actor of such a name is another one."""
    named = [
        {f"{name}-{number}" for name, numbers in groups.items() for number in numbers} for groups in (before, after)
    ]
    return named[0] - named[1]


def is_on(config: RootConfig, role: str, instance: str, machine: str) -> bool:
    """Whether an actor is a machine's; of a run on one machine all are the head's."""
    return machine_of(config, role, instance) == machine


def members(config: RootConfig, scaled: Scaled | None, machine: str | None = None) -> list[tuple[str, str]]:
    """Every (role, instance) of the run (of one machine) as it should be now, in start order."""
    scalable = groups(config)
    fixed = [one for one in instances(config) if one[0] != NODE and one[1].rpartition("-")[0] not in scalable]
    free: list[tuple[str, str]] = []
    for name, numbers in wanted(config, scaled).items():
        free += [(role_of(name), f"{name}-{number}") for number in numbers]
        if role_of(name) == "engine":
            free += nodes_of(config, name, numbers)
    return [one for one in fixed + free if machine is None or is_on(config, *one, machine)]


def parse(text: str) -> Change:
    """`rollout=8`, `policy=+2`, `engine=-1`. Raises RunUnfitError."""
    found = _CHANGE.fullmatch(text)
    if found is None:
        raise RunUnfitError(f"found {text!r}; expected GROUP=N, GROUP=+N or GROUP=-N, for example rollout=8 engine=+2")
    sign, count = found["sign"], int(found["count"])
    return Change(found["group"], -count if sign == "-" else count, sign != "")


def changed(config: RootConfig, now: Mapping[str, Numbers], changes: Sequence[Change]) -> dict[str, Numbers]:
    """`now` with the changes applied in order: new actors get the lowest free numbers, the highest leave. Raises RunUnfitError
    naming what cannot be, and then changes nothing."""
    found = dict(now)
    for change in changes:
        name = _group(config, change.group)
        count = len(found[name]) + change.count if change.relative else change.count
        _check(config, name, count)
        found[name] = _resized(found[name], count)
    return found


def without(config: RootConfig, now: Mapping[str, Numbers], instance: str) -> dict[str, Numbers]:
    """`now` without one instance. Raises RunUnfitError where it is none that is there, or that can leave."""
    name, _, number = instance.rpartition("-")
    there = [f"{group}-{one}" for group, numbers in now.items() for one in numbers]
    if instance not in there:
        raise RunUnfitError(
            f"{instance!r} is no actor of the run that can leave; there are: {', '.join(there) or 'none'}. The others are led"
            " by leases, or are somebody else's engines: `actorctl down` ends all"
        )
    return {**now, name: tuple(one for one in now[name] if one != int(number))}


def _group(config: RootConfig, text: str) -> str:
    """By its name, as `engines.NAME`, or as `engine` where only one group is started."""
    known = groups(config)
    name = text.removeprefix("engines.")
    engines = [one for one in known if one not in ROLES]
    if name == "engine" and name not in known and len(engines) == 1:
        return engines[0]
    if name not in known:
        near = nearest(name, known)
        meant = f"did you mean {near}? " if near is not None else ""
        raise RunUnfitError(f"{text!r} is no group that can be scaled; {meant}There are: {', '.join(known)}")
    return name


def _check(config: RootConfig, name: str, count: int) -> None:
    if not 0 <= count <= MOST:
        raise RunUnfitError(f"{name} would have {count} actors; expected from 0 to {MOST}")
    if name not in ROLES and (fixed := config.engines[name].before_last_part) > count:
        raise RunUnfitError(
            f"{name} would have {count} actors; expected at least {fixed}: of engines.{name}.servers only the last part is"
            " scaled"
        )
    gpus = config.engines[name].gpus_asked if name not in ROLES else bool(getattr(config, name).gpus)
    most = len(groups(config)[name])
    if gpus and count > most:
        raise RunUnfitError(
            f"{name} would have {count} actors, and the run's devices were shared out among {most}; start it with as many as"
            f" there may ever be ({'engines.' if name not in ROLES else ''}{name}.count), and scale it down"
        )


def _resized(numbers: Numbers, count: int) -> Numbers:
    if count <= len(numbers):
        return numbers[:count]
    free = (one for one in range(count + len(numbers)) if one not in numbers)
    return tuple(sorted([*numbers, *(next(free) for _ in range(count - len(numbers)))]))
