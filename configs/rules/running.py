"""Sources, blobs, scaling and supervision.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from physarum.configs.origin import dotted
from physarum.configs.root import RootConfig
from physarum.configs.rules.finding import Finding, Rule
from physarum.configs.supervisor import LONGEST_HEARTBEAT_S


def _mixture(config: RootConfig) -> Iterator[Finding]:
    """The parts of a mixture end at their own times, so that it has no epochs."""
    if config.source.mixture is None:
        return
    for key, epochs in ((("source", "epochs"), config.source.epochs), (("stop", "epochs"), config.stop.epochs)):
        if epochs is not None:
            remedy = f"remove `{dotted(key)}`, and set `stop.steps` or `stop.samples`"
            yield key, f"`{dotted(key)}: {epochs}` with `source.mixture`", "no epochs: each part has its own", remedy


def _blobs(config: RootConfig) -> Iterator[Finding]:
    """Each checkpoint actor has one store."""
    replicas, stores = config.blobs.replicas, config.checkpoint.count
    if replicas > stores:
        found = f"`blobs.replicas: {replicas}` with `checkpoint.count: {stores}`"
        remedy = f"raise `checkpoint.count` to {replicas}, or lower `blobs.replicas`"
        yield ("blobs", "replicas"), found, "a checkpoint actor for each copy", remedy


def _autoscale(config: RootConfig) -> Iterator[Finding]:
    """Rollouts and engines that are started here; devices are shared out once, among as many as are configured."""
    started = {name: engine for name, engine in config.engines.items() if engine.url is None}
    for name, group in (config.autoscale.groups if config.autoscale is not None else {}).items():
        key = ("autoscale", "groups", name)
        if name != "rollout" and name not in started:
            yield (
                key,
                f"`{dotted(key)}`",
                f"one of {', '.join(['rollout', *started])}",
                "remove it, or correct the name",
            )
            continue
        if group.least == 0 and config.evaluation is not None and config.evaluation.engines == name:
            found = f"`{dotted(key)}.least: 0` with `evaluation.engines: {name}`"
            remedy = f"set `{dotted(key)}.least: 1`: an evaluation begins once one of them serves its version"
            yield (*key, "least"), found, "at least 1", remedy
        if name in started and (fewest := started[name].fewest) > group.least:
            found = f"`{dotted(key)}.least: {group.least}` with `engines.{name}.servers`"
            expected = f"at least {fewest}: only the last part is scaled"
            yield (*key, "least"), found, expected, f"set `{dotted(key)}.least: {fewest}` or more"
        section, gpus, count = (
            ("rollout", config.rollout.gpus, config.rollout.count)
            if name == "rollout"
            else (f"engines.{name}", started[name].gpus_asked, started[name].instances)
        )
        if gpus and group.most > count:
            found = f"`{dotted(key)}.most: {group.most}` with `{section}.count: {count}` and `{section}.gpus`"
            yield (*key, "most"), found, f"at most {count}", f"raise `{section}.count`: it begins there, and may shrink"


def _supervision(config: RootConfig) -> Iterator[Finding]:
    s = config.supervisor
    if s.heartbeat_limit_s <= s.heartbeat_s:
        found = f"`supervisor.heartbeat_limit_s: {s.heartbeat_limit_s}` with `supervisor.heartbeat_s: {s.heartbeat_s}`"
        remedy = "raise `supervisor.heartbeat_limit_s`, or lower `supervisor.heartbeat_s`"
        yield ("supervisor", "heartbeat_limit_s"), found, "a limit above the interval", remedy
    elif s.heartbeat_s > LONGEST_HEARTBEAT_S:
        found, expected = f"`supervisor.heartbeat_s: {s.heartbeat_s}`", f"at most {LONGEST_HEARTBEAT_S}"
        remedy = "lower it: who is silent for 10 s counts as gone, and what it holds is given to others"
        yield ("supervisor", "heartbeat_s"), found, expected, remedy
    if s.backoff_max_s < s.backoff_s:
        found = f"`supervisor.backoff_max_s: {s.backoff_max_s}` with `supervisor.backoff_s: {s.backoff_s}`"
        remedy = "raise `supervisor.backoff_max_s`, or lower `supervisor.backoff_s`"
        yield ("supervisor", "backoff_max_s"), found, "a bound of at least the first wait", remedy


def _breakers(config: RootConfig) -> Iterator[Finding]:
    r = config.rollout.routing
    if r.breaker_max_s < r.breaker_base_s:
        found = f"`rollout.routing.breaker_max_s: {r.breaker_max_s:g}` with `breaker_base_s: {r.breaker_base_s:g}`"
        remedy = "raise `rollout.routing.breaker_max_s`, or lower `rollout.routing.breaker_base_s`"
        yield ("rollout", "routing", "breaker_max_s"), found, "a bound of at least the first wait", remedy


RULES: tuple[Rule, ...] = (_mixture, _blobs, _autoscale, _supervision, _breakers)
