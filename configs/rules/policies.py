"""Several policies in one run: each has engines and a name of its own, and what was made for one policy is refused by name.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from physarum.configs.algorithm_rules import algorithm_findings
from physarum.configs.origin import KeyPath, dotted
from physarum.configs.root import RootConfig
from physarum.configs.rules import aging, training
from physarum.configs.rules.finding import Finding, Rule

_LABEL: Final = re.compile(r"[a-z][a-z0-9-]*")
_OWN: Final = ("model", "trainer", "age", "groups", "filters")


def _names(config: RootConfig) -> Iterator[Finding]:
    """A policy's name is its model's in version labels (`solver@3.128`), by which everybody tells policies apart."""
    for name, policy in config.policies.items():
        key: KeyPath = ("policies", name)
        if name == config.model.name or not _LABEL.fullmatch(name):
            found = f"`policies.{name}` beside `model.name: {config.model.name}`"
            yield key, found, "another name, which begins with a letter", "rename one of them"
        if policy.model.name != name:
            found = f"`policies.{name}.model.name: {policy.model.name}`"
            yield (*key, "model", "name"), found, f"`{name}`", "remove it: a further policy is named by its key"


def _engines(config: RootConfig) -> Iterator[Finding]:
    """Every policy is served, and every group serves one that there is."""
    known = (config.model.name, *config.policies)
    for name, group in config.engines.items():
        key: KeyPath = ("engines", name, "policy")
        if group.policy is not None and group.model is not None:
            found = f"`{dotted(key)}` with `engines.{name}.model`"
            yield key, found, "one of the two: a group with `model` follows no versions", "remove one of them"
        elif group.policy is not None and group.policy not in known:
            remedy = "correct the name, or define it under `policies`"
            yield key, f"`{dotted(key)}: {group.policy}`", f"one of {', '.join(known)}", remedy
    for view in config.views() if config.policies else ():
        if not view.following:
            name = view.policy or config.model.name
            found, remedy = f"no engines that serve {name}", f"add a group with `engines.<group>.policy: {name}`"
            yield view.under or ("engines",), found, "a group for each policy", remedy


def _of_one_policy(config: RootConfig) -> Iterator[Finding]:
    """What knows one policy only."""
    if not config.policies:
        return
    for key, given, remedy in _unfit(config):
        if given:
            yield key, f"`{dotted(key)}` with `policies`", "a run with one policy", remedy


def _unfit(config: RootConfig) -> Iterator[tuple[KeyPath, bool, str]]:
    yield ("samples", "recorded"), config.samples.recorded, "remove `policies`: recorded samples train one policy"
    kept = config.samples.keep != "floor"
    yield ("samples", "keep"), kept, "set `samples.keep: floor`: an archive has one writer"
    mirrored = config.checkpoint.mirror is not None
    yield ("checkpoint", "mirror"), mirrored, "remove it: a mirror holds the checkpoints of one policy"
    copied = config.checkpoint.versions is not None
    yield ("checkpoint", "versions"), copied, "remove it: a store of versions holds those of one policy"
    yield ("machines",), bool(config.machines), "remove it: the models of all policies are on one machine"
    yield ("autoscale",), config.autoscale is not None, "remove it, and use `actorctl scale`"
    for name, group in config.engines.items():
        broadcast = group.model is None and group.transport == "nccl"
        yield ("engines", name, "transport"), broadcast, "set `transport: auto`: broadcasts are of one policy"
    for view in config.views():
        under, trainer = view.under, view.trainer
        other = trainer.objective != "rl"
        yield (
            (*under, "trainer", "objective"),
            other,
            "set `objective: rl`: each policy learns from its own samples' rewards",
        )
        yield (*under, "trainer", "record_only"), trainer.record_only, "remove `policies`"
        yield (*under, "trainer", "ordered"), trainer.ordered, "set it to false: exact order is of one policy"
        cuts = any(view.age.of(name).in_flight == "abort" for name in ("", *view.age.streams))
        yield (
            (*under, "age", "in_flight"),
            cuts,
            "set it to `continue`: an execution too old for one may be young for another",
        )


def _each(config: RootConfig) -> Iterator[Finding]:
    """A further policy fits together as the run's own has to."""
    for name in config.policies:
        view = config.of_policy(name)
        for rule in (*aging.RULES, algorithm_findings, *training.RULES):
            for key, found, expected, remedy in rule(view):
                if (own := _own(name, key)) is not None:
                    yield own, found, expected, remedy


def _own(name: str, key: KeyPath) -> KeyPath | None:
    """Where a finding about a view stands; None for what the rules say of the run itself already."""
    if key[:2] == ("rollout", "sampling"):
        return ("policies", name, *key[1:])
    return ("policies", name, *key) if key[0] in _OWN else None


RULES: tuple[Rule, ...] = (_names, _engines, _of_one_policy, _each)
