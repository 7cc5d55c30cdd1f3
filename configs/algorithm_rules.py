"""What cannot be right in `trainer.algorithm`, together with the options it leans on.

Invariant: each finding names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from physarum.configs.age import AgeConfig
from physarum.configs.algorithm import (
    AlgorithmConfig,
    CriticConfig,
    IcePop,
    Mis,
    ReferenceConfig,
    ShapingConfig,
    Tis,
)
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig

Finding = tuple[KeyPath, str, str, str]
"""Key path to point at, found, expected, remedy."""

_OF_GROUPS = ("grpo", "rloo", "reinforce++-baseline", "turns")
_OF_RETURNS = ("gae", "reinforce++")
_PREFIX = "trainer.algorithm"


def algorithm_findings(config: RootConfig) -> Iterator[Finding]:
    """Every contradiction; empty where the algorithm fits its objective, its groups and the age bound."""
    if config.trainer.objective == "sft":
        return
    for rule in (
        _groups,
        _off_policy,
        _double_weights,
        _together,
        _idle,
        _kl,
        _distillation,
        _shaping,
        _reduction,
        _minibatches,
        _replay,
        _hooks,
    ):
        for option, found, expected, remedy in rule(config, config.trainer.algorithm):
            yield _path(option), found, expected, remedy


def _path(option: str) -> KeyPath:
    return tuple(option.split("."))


_Rule = Iterator[tuple[str, str, str, str]]


def _groups(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    """An advantage relative to the group, or a pair, needs somebody to be compared with."""
    if config.samples.recorded or config.source.group_size > 1:
        return
    preference = config.trainer.objective == "dpo"
    if preference or algorithm.advantage in _OF_GROUPS:
        other = "trainer.objective: dpo" if preference else f"{_PREFIX}.advantage: {algorithm.advantage}"
        found = f"`source.group_size: 1` with `{other}`"
        remedy = "raise `source.group_size`: a group of one has no advantage to learn from"
        yield "source.group_size", found, "a group of at least 2", remedy
    if config.trainer.groups_per_batch == 1 and algorithm.whiten:
        found = f"`{_PREFIX}.whiten: true` with `source.group_size: 1` and `trainer.groups_per_batch: 1`"
        remedy = "raise `trainer.groups_per_batch`: one execution's own mean would take its reward away"
        yield f"{_PREFIX}.whiten", found, "at least 2 executions in a batch", remedy


def _off_policy(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    """Tokens of an older version need a correction, or a ratio against those who made them."""
    if config.trainer.objective != "rl" or algorithm.correction or algorithm.old_logprobs in ("engine", "kept"):
        return
    for option, remedy in _allows_older(config.age):
        yield (
            f"{_PREFIX}.correction",
            f"`{_PREFIX}.correction: none` with `{option}`",
            "a correction for tokens of older versions",
            f"set `{_PREFIX}.correction: tis`, or `{remedy}`",
        )


def _allows_older(age: AgeConfig) -> Iterator[tuple[str, str]]:
    """(Option that lets tokens of older versions have gradient, what would forbid it)."""
    policies = [("age", age.of(""))] + [(f"age.streams.{name}", age.of(name)) for name in age.streams]
    for prefix, policy in policies:
        if policy.bound > 0:
            yield f"{prefix}.bound: {policy.bound}", f"{prefix}.bound: 0"
        elif policy.consumption == "train":
            yield f"{prefix}.consumption: train", f"{prefix}.consumption: mask"


def _double_weights(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    """The ratio against the engine is the importance weight already."""
    weighing = [one.kind for one in algorithm.correction if isinstance(one, (Tis, Mis, IcePop))]
    if algorithm.old_logprobs == "engine" and weighing:
        yield (
            f"{_PREFIX}.correction",
            f"`{_PREFIX}.correction: {weighing[0]}` with `{_PREFIX}.old_logprobs: engine`",
            "each token's importance weighed once",
            f"set `{_PREFIX}.old_logprobs: recompute`, or `{_PREFIX}.correction: none` (or one that only masks)",
        )


def _together(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    """Each kind once, and of those that weigh by the ratio only one: their weights would multiply."""
    kinds = [one.kind for one in algorithm.correction]
    weighing = [one.kind for one in algorithm.correction if isinstance(one, (Tis, Mis, IcePop))]
    twice = [kind for kind in kinds if kinds.count(kind) > 1] or (weighing if len(weighing) > 1 else [])
    if twice:
        yield (
            f"{_PREFIX}.correction",
            f"corrections {' and '.join(f'`{kind}`' for kind in twice)} together",
            "each kind once, and one of tis, mis, icepop: each weighs by the same ratio",
            "keep one of them; those that only mask (opsm, m2po, dppo, age) may stand beside it",
        )


def _kl(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    kl = algorithm.kl
    if kl.coef == 0:
        return
    if kl.place == "reward" and algorithm.advantage not in _OF_RETURNS:
        yield (
            f"{_PREFIX}.kl.place",
            f"`{_PREFIX}.kl.place: reward` with `{_PREFIX}.advantage: {algorithm.advantage}`",
            "an advantage made of rewards per token (gae, reinforce++)",
            f"set `{_PREFIX}.kl.place: loss`, or `{_PREFIX}.advantage: reinforce++`",
        )
    if kl.place == "loss" and kl.kind == "k1":
        yield (
            f"{_PREFIX}.kl.kind",
            f"`{_PREFIX}.kl.kind: k1` with `{_PREFIX}.kl.place: loss`",
            "an estimate whose gradient is not zero in expectation",
            f"set `{_PREFIX}.kl.kind: k2` (or unbiased), or `{_PREFIX}.kl.place: reward`",
        )
    if kl.place == "reward" and kl.kind == "unbiased":
        yield (
            f"{_PREFIX}.kl.kind",
            f"`{_PREFIX}.kl.kind: unbiased` with `{_PREFIX}.kl.place: reward`",
            "an estimate without gradient",
            f"set `{_PREFIX}.kl.kind: k1`, or `{_PREFIX}.kl.place: loss`",
        )


def _distillation(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    distils = algorithm.advantage == "distillation"
    if distils and not algorithm.teachers:
        yield (
            f"{_PREFIX}.teachers",
            f"`{_PREFIX}.advantage: distillation` without `{_PREFIX}.teachers`",
            "at least one teacher",
            f"add `{_PREFIX}.teachers: {{NAME: {{model: FOLDER}}}}`, or take another advantage",
        )
    if algorithm.teachers and not distils and ":" not in algorithm.advantage:
        yield (
            f"{_PREFIX}.teachers",
            f"`{_PREFIX}.teachers` with `{_PREFIX}.advantage: {algorithm.advantage}`",
            "teachers that are listened to",
            f"set `{_PREFIX}.advantage: distillation` (`reward_weight` adds the reward), or remove them",
        )


def _idle(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    """Options that nothing reads."""
    preference = config.trainer.objective == "dpo"
    if algorithm.reference != ReferenceConfig() and algorithm.kl.coef == 0 and not preference:
        yield (
            f"{_PREFIX}.reference",
            f"`{_PREFIX}.reference` with `{_PREFIX}.kl.coef: 0`",
            "a penalty that refers to it",
            f"set `{_PREFIX}.kl.coef`, or remove `reference`",
        )
    if algorithm.critic != CriticConfig() and (preference or algorithm.advantage != "gae"):
        yield (
            f"{_PREFIX}.critic",
            f"`{_PREFIX}.critic` with `{_PREFIX}.advantage: {algorithm.advantage}`",
            "the advantage that has a critic",
            f"set `{_PREFIX}.advantage: gae`, or remove `critic`",
        )
    if algorithm.reward_weight and algorithm.advantage != "distillation":
        yield (
            f"{_PREFIX}.reward_weight",
            f"`{_PREFIX}.reward_weight: {algorithm.reward_weight}` with `{_PREFIX}.advantage: {algorithm.advantage}`",
            "teachers beside which the reward stands",
            f"set `{_PREFIX}.advantage: distillation`, or remove `reward_weight`",
        )
    if algorithm.advantage == "turns" and algorithm.shaping != ShapingConfig():
        yield (
            f"{_PREFIX}.shaping",
            f"`{_PREFIX}.shaping` with `{_PREFIX}.advantage: turns`",
            "scores of turns, which are taken as they are",
            "shape them in the reward hook, or take another advantage",
        )


def _shaping(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    overlong = algorithm.shaping.overlong
    if overlong is not None and overlong.buffer_tokens > overlong.max_tokens:
        yield (
            f"{_PREFIX}.shaping.overlong",
            f"`buffer_tokens: {overlong.buffer_tokens}` with `max_tokens: {overlong.max_tokens}`",
            "a buffer within the longest response",
            f"lower `{_PREFIX}.shaping.overlong.buffer_tokens`, or raise `max_tokens`",
        )


def _reduction(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    if (algorithm.reduction == "constant") != (algorithm.constant_tokens is not None):
        given = "without" if algorithm.constant_tokens is None else "with"
        yield (
            f"{_PREFIX}.constant_tokens",
            f"`{_PREFIX}.reduction: {algorithm.reduction}` {given} `{_PREFIX}.constant_tokens`",
            "the length by which `constant` divides, and only there",
            f"set both `{_PREFIX}.reduction: constant` and `{_PREFIX}.constant_tokens`, or neither",
        )


def _minibatches(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    groups = config.trainer.groups_per_batch
    if algorithm.minibatches > groups:
        yield (
            f"{_PREFIX}.minibatches",
            f"`{_PREFIX}.minibatches: {algorithm.minibatches}` with `trainer.groups_per_batch: {groups}`",
            "at least one group for each",
            f"lower `{_PREFIX}.minibatches` to {groups}, or raise `trainer.groups_per_batch`",
        )


def _replay(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    """What nothing could differ from. Whether the model has experts is seen when it is read."""
    sampling = config.rollout.sampling
    if algorithm.replay.routing == "R2" and algorithm.minibatches == 1:
        yield (
            f"{_PREFIX}.replay.routing",
            f"`{_PREFIX}.replay.routing: R2` with `{_PREFIX}.minibatches: 1`",
            "an update between the pass that records the routing and one that replays it",
            f"raise `{_PREFIX}.minibatches`, or set `{_PREFIX}.replay.routing: R3` (or off)",
        )
    if algorithm.replay.nucleus and not config.samples.recorded and sampling.top_p == 1 and sampling.top_k <= 0:
        yield (
            f"{_PREFIX}.replay.nucleus",
            f"`{_PREFIX}.replay.nucleus: true` with `rollout.sampling.top_p: 1.0` and"
            f" `rollout.sampling.top_k: {sampling.top_k}`",
            "sampling that cuts the vocabulary",
            f"set `rollout.sampling.top_p` below 1 or `top_k` above 0, or `{_PREFIX}.replay.nucleus: false`",
        )


def _hooks(config: RootConfig, algorithm: AlgorithmConfig) -> _Rule:
    if algorithm.hook_args and ":" not in algorithm.advantage + algorithm.loss:
        yield (
            f"{_PREFIX}.hook_args",
            f"`{_PREFIX}.hook_args` with `{_PREFIX}.advantage: {algorithm.advantage}` and `loss: {algorithm.loss}`",
            "a hook that takes them",
            f"name one in `{_PREFIX}.advantage` or `{_PREFIX}.loss`, or remove `hook_args`",
        )
