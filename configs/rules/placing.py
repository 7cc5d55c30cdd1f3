"""Several machines: what each names is there, and what they need of each other.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from physarum.configs.machines import HEAD, names_of
from physarum.configs.origin import KeyPath, dotted
from physarum.configs.placement import ENGINES, dealt, group_keys, machine_names, share, slots
from physarum.configs.root import RootConfig
from physarum.configs.rules.finding import Finding, Rule
from physarum.configs.suggest import nearest

_KEY: Final[KeyPath] = ("machines",)


def _names(config: RootConfig) -> Iterator[Finding]:
    """Each machine once; the head is one."""
    head = config.machines.get(HEAD)
    if head is not None and head.count is not None:
        yield (*_KEY, HEAD, "count"), f"`machines.{HEAD}.count: {head.count}`", "one head", "remove the key"
        return
    if "0" in machine_names(config):
        yield (*_KEY, "0"), "a machine called 0", "a name that no supervisor has yet", "rename it"
    for name, times in Counter(machine_names(config)).items():
        entries = [entry for entry, machine in config.machines.items() if name in names_of(entry, machine)]
        if times > 1 and entries:
            found = f"the machine {name} {times} times, of {' and '.join(f'`machines.{entry}`' for entry in entries)}"
            yield (*_KEY, entries[-1]), found, "each machine once", "rename one of them"
    for entry, machine in config.machines.items():
        if entry != HEAD and not any(share(machine, key) for key in group_keys(config)):
            remedy = "name what it has (`engines`, `rollout`, `reward`), or remove it"
            yield (*_KEY, entry), f"`machines.{entry}` with nothing to start", "actors for each machine", remedy


def _groups(config: RootConfig) -> Iterator[Finding]:
    """What machines have are groups of this run, and as many actors as the group has."""
    for entry, machine in config.machines.items():
        for name in machine.engines.keys() - config.engines.keys():
            near = nearest(name, config.engines)
            remedy = f"write `{near}`" if near else f"add `engines.{name}`, or remove the key"
            yield (*_KEY, entry, ENGINES, name), f"`machines.{entry}.engines.{name}`", "a group of `engines`", remedy
    for key in group_keys(config):
        named = [(entry, share(one, key)) for entry, one in config.machines.items() if share(one, key) is not None]
        there = sum(len(names_of(entry, config.machines[entry])) * (each or 0) for entry, each in named)
        asked = len(slots(config, key))
        if named and there != asked:
            unit = "processes (engines times nodes)" if key[0] == ENGINES else "actors"
            found = f"machines with {there} {unit} of `{dotted(key)}`, which has {asked}"
            remedy = f"change `machines.{named[-1][0]}`, or leave `{dotted(key)}.count` out: it is then their sum"
            yield (*_KEY, named[-1][0]), found, "as many as the group has", remedy


def _reachable(config: RootConfig) -> Iterator[Finding]:
    """One bus for all, and a token: without it nothing listens beyond loopback."""
    if config.bus.url is None:
        remedy = "start a NATS server that every machine reaches (docs/external-bus.md), and set `bus.url`"
        yield _KEY, "`machines` without `bus.url`", "a bus that all machines reach", remedy
    if config.checkpoint.token_env is None:
        remedy = "set `checkpoint.token_env` to the name of a variable that holds the same secret on every machine"
        yield (
            _KEY,
            "`machines` without `checkpoint.token_env`",
            "a token, with which engines and weights listen",
            remedy,
        )
    if config.blobs.access == "folder":
        found, remedy = "`machines` with `blobs.access: folder`", "set `blobs.access: auto`"
        yield ("blobs", "access"), found, "blobs over HTTP: each machine has a folder of its own", remedy


def _engines(config: RootConfig) -> Iterator[Finding]:
    """What of a group of engines listens without a token, or must be on one machine."""
    for name, group in config.engines.items():
        key: KeyPath = (ENGINES, name)
        named = any(share(machine, key) is not None for machine in config.machines.values())
        if group.url is not None and named:
            found = f"`machines` with servers of `engines.{name}.url`"
            yield (*key, "url"), found, "groups that are started here", f"remove {name} from `machines`"
        if group.paired or group.encodes:
            found = f"`engines.{name}.servers` of prefill, decode or encoder servers with `machines`"
            expected = "servers with one HTTP port: bootstrap ports take no token"
            yield (*key, "servers"), found, expected, "use regular servers, or one machine"
        for option in ("router", "start_router"):
            if getattr(group, option) is not None:
                found = f"`engines.{name}.{option}` with `machines`"
                yield (*key, option), found, "engines that are asked directly, with their token", "remove it"
        if group.weights_folder is None and _apart(config, key):
            found = f"nodes of an engine of `engines.{name}` on several machines without `weights_folder`"
            remedy = f"set `engines.{name}.weights_folder` to a folder that they see under this path"
            yield (*key, "weights_folder"), found, "a folder that all nodes read", remedy


def _apart(config: RootConfig, key: KeyPath) -> bool:
    """Whether an engine of the group has nodes on several machines."""
    homes: dict[int, set[str]] = {}
    for slot, machine in dealt(config, key).items():
        homes.setdefault(slot.number, set()).add(machine)
    return any(len(places) > 1 for places in homes.values())


def _several(rule: Rule) -> Rule:
    """Nothing of this concerns a run on one machine."""
    return lambda config: rule(config) if config.machines else iter(())


RULES: tuple[Rule, ...] = tuple(_several(rule) for rule in (_names, _groups, _reachable, _engines))
