"""What the trainer is asked for against what it gets: objective, batches, world, lengths.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from physarum.configs.origin import KeyPath, dotted
from physarum.configs.root import RootConfig
from physarum.configs.rules.finding import Finding, Rule
from physarum.configs.trainer import TrainerConfig


def _objective(config: RootConfig) -> Iterator[Finding]:
    if config.trainer.objective == "sft" or config.samples.recorded:
        return
    objective = config.trainer.objective
    needed: list[tuple[KeyPath, object]] = [
        (("rollout", "generate"), config.rollout.generate),
        (("reward", "hook"), config.reward.scores or config.reward.group is not None),
    ]
    needed += [(("engines",), config.engines)] if objective == "rl" else []  # preferences may be given, and only scored
    for key, value in needed:
        if not value:
            remedy = f"add `{dotted(key)}`, or train with `trainer.objective: sft`"
            yield key, f"no `{dotted(key)}`", f"it with `trainer.objective: {objective}`", remedy


def _replicas(config: RootConfig) -> Iterator[Finding]:
    """The embedded server is one server."""
    if config.bus.url is None and config.bus.replicas > 1:
        found = f"`bus.replicas: {config.bus.replicas}` without `bus.url`"
        remedy = "set `bus.url` to the servers of a cluster (docs/external-bus.md), or `bus.replicas: 1`"
        yield ("bus", "replicas"), found, "1 with the embedded server", remedy


def _recording(config: RootConfig) -> Iterator[Finding]:
    """Nothing is disposed of where nothing is trained: any other admission would stop after the first batches."""
    admission = config.age.of(config.source.name).admission
    if config.trainer.record_only and admission != "free":
        found = f"`trainer.record_only: true` with `age.admission: {admission}`"
        yield ("age", "admission"), found, "`free`", "set `age.admission: free` (actorctl rollout-only does)"


def _ordered(config: RootConfig) -> Iterator[Finding]:
    """Ordered mode is exact only if one batch is out at a time and every version is served."""
    if not config.trainer.ordered:
        return
    age = config.age.of(config.source.name)
    needed: list[tuple[KeyPath, object, object]] = [
        (("age", "bound"), age.bound, 0),
        (("age", "admission"), age.admission, "count"),
        (("trainer", "publish_every"), config.trainer.publish_every, 1),
    ]
    for key, found, expected in needed:
        if found != expected:
            text = f"`{dotted(key)}: {found}` with `trainer.ordered: true`"
            remedy = f"set `{dotted(key)}: {expected}`, or `trainer.ordered: false`"
            yield key, text, "one batch at a time, made by the newest version", remedy
    for name, group in config.engines.items():
        if group.canary is not None:
            key = ("engines", name, "canary")
            remedy = f"remove `{dotted(key)}`, or set `trainer.ordered: false`"
            yield key, f"`{dotted(key)}` with `trainer.ordered: true`", "engines that serve every version", remedy


def _world(config: RootConfig) -> Iterator[Finding]:
    trainer, group_size = config.trainer, config.source.group_size
    sizes = f"`tp * pp * cp` = {trainer.tp} * {trainer.pp} * {trainer.cp} = {trainer.model_parallel}"
    if trainer.ranks % trainer.model_parallel:
        found = f"`trainer.ranks: {trainer.ranks}` with {sizes}"
        remedy = f"set `trainer.ranks` to a multiple of {trainer.model_parallel}, or lower tp, pp or cp"
        yield ("trainer", "ranks"), found, "ranks divisible by tp * pp * cp", remedy
        return
    yield from _experts(trainer)
    replicas, batch = trainer.ranks // trainer.model_parallel, trainer.groups_per_batch * group_size
    if batch < replicas:
        found = (
            f"{batch} executions (`trainer.groups_per_batch` * `source.group_size`) for {replicas} data-parallel ranks"
        )
        remedy = f"raise `trainer.groups_per_batch` to {-(-replicas // group_size)}, or lower `trainer.ranks`"
        yield ("trainer", "groups_per_batch"), found, "at least one execution for each data-parallel rank", remedy


def _experts(trainer: TrainerConfig) -> Iterator[Finding]:
    """Experts are spread over the ranks of a pipeline stage."""
    etp = trainer.tp if trainer.etp is None else trainer.etp
    if etp not in (1, trainer.tp):
        found = f"`trainer.etp: {etp}` with `trainer.tp: {trainer.tp}`"
        yield ("trainer", "etp"), found, f"1 or {trainer.tp}", "leave `trainer.etp` out, or set it to 1"
        return
    stage = trainer.ranks // trainer.pp
    if stage % (etp * trainer.ep):
        found = f"`ep * etp` = {trainer.ep} * {etp} with `trainer.ranks / trainer.pp` = {stage}"
        remedy = f"set `trainer.ranks` to a multiple of {trainer.pp * etp * trainer.ep}, or lower `trainer.ep`"
        yield ("trainer", "ep"), found, "ranks of a pipeline stage divisible by ep * etp", remedy


def _sequence_length(config: RootConfig) -> Iterator[Finding]:
    """The longest sequence known: the engines' context length where it is set, else one prompt token and one answer."""
    if config.trainer.objective != "rl":
        return
    contexts = [
        (length, f"engines.{name}.sglang.context-length")
        for name, group in config.following.items()
        for length in group.values_of("context-length")
        if isinstance(length, int)
    ]
    answer = (config.rollout.sampling.max_new_tokens + 1, "rollout.sampling.max_new_tokens")
    longest, option = max(contexts, default=answer)
    budget = config.trainer.tokens_per_microbatch
    if budget < longest:
        found = f"`trainer.tokens_per_microbatch: {budget}` with sequences of up to {longest} tokens (`{option}`)"
        remedy = f"raise `trainer.tokens_per_microbatch` to {longest}, or lower `{option}`"
        yield ("trainer", "tokens_per_microbatch"), found, "room for the longest sequence", remedy


def _answers_fit(config: RootConfig) -> Iterator[Finding]:
    """SGLang refuses a request whose prompt and answer may together be longer than its context: it would refuse every one."""
    asked: list[tuple[KeyPath, int]] = [
        (("rollout", "sampling", "max_new_tokens"), config.rollout.sampling.max_new_tokens)
    ]
    if config.evaluation is not None:
        for key, part in config.evaluation.parts():
            sampling = config.evaluation.sampling_of(part)
            asked.append((("evaluation", *key, "sampling", "max_new_tokens"), sampling.max_new_tokens))
    for name, group in config.following.items():
        lengths = [length for length in group.values_of("context-length") if isinstance(length, int)]
        if not lengths:
            continue
        context = min(lengths)
        for key, tokens in asked:
            if tokens >= context:
                option = f"engines.{name}.sglang.context-length"
                remedy = f"lower `{dotted(key)}`, or raise `{option}`"
                yield key, f"`{dotted(key)}: {tokens}` with `{option}: {context}`", "room for a prompt", remedy


RULES: tuple[Rule, ...] = (_objective, _replicas, _recording, _ordered, _world, _sequence_length, _answers_fit)
