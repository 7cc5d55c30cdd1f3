"""Bounds of age, and groups that are to go on with a part of their members.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from physarum.configs.age import AgePolicy
from physarum.configs.origin import KeyPath, dotted
from physarum.configs.root import RootConfig
from physarum.configs.rules.finding import Finding, Rule


def _age(config: RootConfig) -> Iterator[Finding]:
    """Each policy with what it needs: of the whole section, then of the source that has its own."""
    for name in config.age.streams:
        if name != config.source.name and not config.samples.recorded:
            found = f"`age.streams.{name}` with `source.name: {config.source.name}`"
            remedy = f"rename it to `{config.source.name}`, or remove it"
            yield ("age", "streams", name), found, "the name of a source", remedy
    policies: list[tuple[KeyPath, AgePolicy]] = [(("age",), config.age)]
    policies += [(("age", "streams", name), config.age.of(name)) for name in config.age.streams]
    for key, policy in policies:
        yield from _age_policy(config, key, policy)


def _age_policy(config: RootConfig, key: KeyPath, policy: AgePolicy) -> Iterator[Finding]:
    prefix = dotted(key)
    if policy.in_flight == "abort" and policy.consumption != "drop":
        yield (
            (*key, "in_flight"),
            f"`{prefix}.in_flight: abort` with `{prefix}.consumption: {policy.consumption}`",
            "`drop`: only there an execution with a token over the bound is lost for training",
            f"set `{prefix}.consumption: drop`, or `{prefix}.in_flight: continue`",
        )
    if policy.consumption != "wait":
        return
    if policy.admission == "free":
        yield (
            (*key, "admission"),
            f"`{prefix}.consumption: wait` with `{prefix}.admission: free`",
            "at most bound + 1 batches under way: else the first of a batch is over the bound when the last one comes",
            f"set `{prefix}.admission: count`, or `{prefix}.consumption: mask`",
        )
    if config.samples.recorded:
        yield (
            (*key, "consumption"),
            f"`{prefix}.consumption: wait` with `samples.recorded: true`",
            "samples that are still being made: what was recorded may lack the task that is waited for",
            f"set `{prefix}.consumption: mask`, or `train`",
        )


def _published(config: RootConfig) -> Iterator[Finding]:
    """Before the engines' next version is due, batches of the one they have must still be trained."""
    policy, every = config.age.of(config.source.name), config.trainer.publish_every
    trains = config.trainer.objective == "rl" and not config.trainer.record_only and config.following
    if trains and policy.consumption != "train" and every > policy.bound + 1:
        found = f"`trainer.publish_every: {every}` with `age.bound: {policy.bound}`"
        remedy = f"set `trainer.publish_every: {policy.bound + 1}` or less, or raise `age.bound` to {every - 1}"
        yield (
            ("trainer", "publish_every"),
            found,
            "at most bound + 1: else what engines make is over the bound before they get another version",
            remedy,
        )


def _enough(config: RootConfig) -> Iterator[Finding]:
    """A group that goes on early: fewer than are issued, no fewer than are needed, and not where all are waited for."""
    enough, key = config.groups.enough, ("groups", "enough")
    if enough is None:
        return
    if enough > config.source.group_size and config.source.curriculum is None:
        found = f"`groups.enough: {enough}` with `source.group_size: {config.source.group_size}`"
        yield key, found, "at most the members that are issued", "raise `source.group_size`, or remove `groups.enough`"
    if enough < config.groups.min_members:
        found = f"`groups.enough: {enough}` with `groups.min_members: {config.groups.min_members}`"
        yield (
            key,
            found,
            "at least the members that a group needs",
            "lower `groups.min_members`, or raise `groups.enough`",
        )
    if config.trainer.ordered or config.age.of(config.source.name).consumption == "wait":
        other = "trainer.ordered: true" if config.trainer.ordered else "age.consumption: wait"
        found = f"`groups.enough: {enough}` with `{other}`"
        yield key, found, "groups that do not depend on who is first", "remove `groups.enough`, or the other"


RULES: tuple[Rule, ...] = (_age, _published, _enough)
