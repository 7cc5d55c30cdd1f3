"""Evaluations: their data, their engines.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig
from physarum.configs.rules.finding import Finding, Rule


def _evaluated(config: RootConfig) -> Iterator[Finding]:
    """A run that only evaluates has an evaluation at its start, and no trainer that waits for samples."""
    if not config.stop.evaluated:
        return
    needed = {
        "evaluation.at_start: true": config.evaluation is not None and config.evaluation.at_start,
        "trainer.record_only: true": config.trainer.record_only,
    }
    for option, there in needed.items():
        if not there:
            yield (
                ("stop", "evaluated"),
                f"`stop.evaluated` without `{option}`",
                "both",
                "use actorctl eval, which sets them",
            )


def _evaluation(config: RootConfig) -> Iterator[Finding]:
    if config.evaluation is None:
        return
    sets = config.evaluation.named().values()
    needed = {
        "engines": config.engines,
        "rollout.generate": config.rollout.generate,
        "reward.hook": config.reward.scores or all(part.reward is not None for part in sets),
    }
    for option, value in needed.items():
        if not value and config.trainer.objective == "sft":
            remedy = f"add `{option}`, or set `evaluation: null`"
            yield ("evaluation",), f"`evaluation` without `{option}`", "what makes and scores its answers", remedy
    if config.reward.group is not None and not config.reward.scores:
        remedy = "add `reward.hook` or `reward.type`, which score evaluations, or set `evaluation: null`"
        yield ("evaluation",), "`evaluation` with `reward.group` alone", "what scores one answer by itself", remedy


def _evaluation_engines(config: RootConfig) -> Iterator[Finding]:
    """They follow the policy's versions, and training has others."""
    own = None if config.evaluation is None else config.evaluation.engines
    if own is None:
        if config.evaluation is not None and config.evaluation.overflow == "wait":
            found, expected = (
                "`evaluation.overflow: wait` without `evaluation.engines`",
                "engines that stay at a version",
            )
            remedy = "name a group that is kept for evaluations, or set `overflow: skip`"
            yield ("evaluation", "overflow"), found, expected, remedy
        return
    key: KeyPath = ("evaluation", "engines")
    following = list(config.following)
    if own not in following:
        there = ", ".join(following) or "none"
        expected = f"a group under `engines` without `model` that follows the run's own policy; there are: {there}"
        yield key, f"`evaluation.engines: {own}`", expected, "name one of them, or define the group"
    elif config.engines[own].transport == "nccl":
        found = f"`engines.{own}.transport: nccl` with `evaluation.engines: {own}`"
        remedy = "leave the transport to `auto`"
        yield ("engines", own, "transport"), found, "a transport that fetches: they take few of the versions", remedy
    elif following == [own]:
        remedy = "define another group for training, or remove `evaluation.engines`"
        yield key, f"`evaluation.engines: {own}`, the only group that follows versions", "engines for training", remedy


RULES: tuple[Rule, ...] = (_evaluated, _evaluation, _evaluation_engines)
