"""Checks over several sections at once, which need nothing but the configuration itself.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import JsonValue

from physarum.configs.age import AgePolicy
from physarum.configs.algorithm_rules import algorithm_findings
from physarum.configs.devices import device_groups
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath, dotted
from physarum.configs.reward_rules import given_options, reward_problems
from physarum.configs.reward_types import ClassifierReward, ServedReward
from physarum.configs.root import RootConfig
from physarum.configs.sglang_arguments import RESERVED, WAITS_FOR_WEIGHTS
from physarum.configs.trainer import TrainerConfig

_Finding = tuple[KeyPath, str, str, str]
"""Key path to point at, found, expected, remedy."""


def semantic_problems(config: RootConfig) -> list[Problem]:
    """Every contradiction between sections; empty when the configuration fits together."""
    found_by_rules = [
        Problem(Severity.ERROR, config.origins.where(key), found, expected, remedy)
        for rule in _RULES
        for key, found, expected, remedy in rule(config)
    ]
    return [*found_by_rules, *reward_problems(config.reward, config.origins)]


def _objective(config: RootConfig) -> Iterator[_Finding]:
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


def _replicas(config: RootConfig) -> Iterator[_Finding]:
    """The embedded server is one server."""
    if config.bus.url is None and config.bus.replicas > 1:
        found = f"`bus.replicas: {config.bus.replicas}` without `bus.url`"
        remedy = "set `bus.url` to the servers of a cluster (docs/external-bus.md), or `bus.replicas: 1`"
        yield ("bus", "replicas"), found, "1 with the embedded server", remedy


def _recording(config: RootConfig) -> Iterator[_Finding]:
    """Nothing is disposed of where nothing is trained: any other admission would stop after the first batches."""
    admission = config.age.of(config.source.name).admission
    if config.trainer.record_only and admission != "free":
        found = f"`trainer.record_only: true` with `age.admission: {admission}`"
        yield ("age", "admission"), found, "`free`", "set `age.admission: free` (actorctl rollout-only does)"


def _age(config: RootConfig) -> Iterator[_Finding]:
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


def _age_policy(config: RootConfig, key: KeyPath, policy: AgePolicy) -> Iterator[_Finding]:
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


def _evaluated(config: RootConfig) -> Iterator[_Finding]:
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


def _mixture(config: RootConfig) -> Iterator[_Finding]:
    """The parts of a mixture end at their own times, so that it has no epochs."""
    if config.source.mixture is None:
        return
    for key, epochs in ((("source", "epochs"), config.source.epochs), (("stop", "epochs"), config.stop.epochs)):
        if epochs is not None:
            remedy = f"remove `{dotted(key)}`, and set `stop.steps` or `stop.samples`"
            yield key, f"`{dotted(key)}: {epochs}` with `source.mixture`", "no epochs: each part has its own", remedy


def _ordered(config: RootConfig) -> Iterator[_Finding]:
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


def _world(config: RootConfig) -> Iterator[_Finding]:
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


def _experts(trainer: TrainerConfig) -> Iterator[_Finding]:
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


def _sequence_length(config: RootConfig) -> Iterator[_Finding]:
    """The longest sequence known: the engines' context length where it is set, else one prompt token and one answer."""
    if config.trainer.objective != "rl":
        return
    contexts = [
        (length, f"engines.{name}.sglang.context-length")
        for name, group in config.engines.items()
        for length in group.values_of("context-length")
        if group.model is None and isinstance(length, int)
    ]
    answer = (config.rollout.sampling.max_new_tokens + 1, "rollout.sampling.max_new_tokens")
    longest, option = max(contexts, default=answer)
    budget = config.trainer.tokens_per_microbatch
    if budget < longest:
        found = f"`trainer.tokens_per_microbatch: {budget}` with sequences of up to {longest} tokens (`{option}`)"
        remedy = f"raise `trainer.tokens_per_microbatch` to {longest}, or lower `{option}`"
        yield ("trainer", "tokens_per_microbatch"), found, "room for the longest sequence", remedy


def _answers_fit(config: RootConfig) -> Iterator[_Finding]:
    """SGLang refuses a request whose prompt and answer may together be longer than its context: it would refuse every one."""
    asked: list[tuple[KeyPath, int]] = [
        (("rollout", "sampling", "max_new_tokens"), config.rollout.sampling.max_new_tokens)
    ]
    if config.evaluation is not None:
        for key, part in config.evaluation.parts():
            sampling = config.evaluation.sampling_of(part)
            asked.append((("evaluation", *key, "sampling", "max_new_tokens"), sampling.max_new_tokens))
    for name, group in config.engines.items():
        lengths = [length for length in group.values_of("context-length") if isinstance(length, int)]
        if group.model is not None or not lengths:
            continue
        context = min(lengths)
        for key, tokens in asked:
            if tokens >= context:
                option = f"engines.{name}.sglang.context-length"
                remedy = f"lower `{dotted(key)}`, or raise `{option}`"
                yield key, f"`{dotted(key)}: {tokens}` with `{option}: {context}`", "room for a prompt", remedy


def _evaluation(config: RootConfig) -> Iterator[_Finding]:
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


def _judges(config: RootConfig) -> Iterator[_Finding]:
    """A judge is an engine of this run that stays as it is; a classifier is served as one, and read with its own tokenizer."""
    for key, options in given_options(config.reward, ServedReward):
        named, place = options.engine, (*key, "engine")
        if named is not None and (named not in config.engines or config.engines[named].model is None):
            remedy = f"add `engines.{named}.model`, or name a group that has a model of its own"
            found = f"`{dotted(place)}: {named}` without `engines.{named}.model`"
            yield place, found, "a group of engines with a model of its own", remedy
        elif isinstance(options, ClassifierReward):
            yield from _classifier(config, key, options)


def _classifier(config: RootConfig, key: KeyPath, options: ClassifierReward) -> Iterator[_Finding]:
    if options.engine is not None and not config.engines[options.engine].sglang.get("is-embedding"):
        place = f"engines.{options.engine}.sglang.is-embedding"
        yield (
            (*key, "engine"),
            f"`{dotted((*key, 'engine'))}: {options.engine}` without `{place}`",
            "a classifier",
            (f"set `{place}: true`"),
        )
    if options.engine is None and options.render == "chat" and options.model is None:
        found = f"`{dotted(key)}.render: chat` with `url` and without `model`"
        remedy = f"name the classifier's folder in `{dotted(key)}.model`, or set `render: tokens`"
        yield (*key, "render"), found, "the tokenizer that renders", remedy


def _evaluation_engines(config: RootConfig) -> Iterator[_Finding]:
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
    following = [name for name, group in config.engines.items() if group.model is None]
    if own not in following:
        expected = f"a group under `engines` without `model`; there are: {', '.join(following) or 'none'}"
        yield key, f"`evaluation.engines: {own}`", expected, "name one of them, or define the group"
    elif config.engines[own].transport == "nccl":
        found = f"`engines.{own}.transport: nccl` with `evaluation.engines: {own}`"
        remedy = "leave the transport to `auto`"
        yield ("engines", own, "transport"), found, "a transport that fetches: they take few of the versions", remedy
    elif following == [own]:
        remedy = "define another group for training, or remove `evaluation.engines`"
        yield key, f"`evaluation.engines: {own}`, the only group that follows versions", "engines for training", remedy


def _engine_arguments(config: RootConfig) -> Iterator[_Finding]:
    """What physarum sets itself; servers at a `url` take no arguments at all."""
    for name, group in config.engines.items():
        places: list[tuple[KeyPath, dict[str, JsonValue]]] = [((), group.sglang)] if group.url is None else []
        places += [(("servers", place), part.sglang) for place, part in enumerate(group.servers)]
        for within, argument in (
            (one, argument) for one, given in places for argument in sorted(given.keys() & RESERVED)
        ):
            key: KeyPath = ("engines", name, *within, "sglang", argument)
            yield key, f"`{dotted(key)}`", "arguments that physarum does not set itself", RESERVED[argument]
        if group.model is not None and group.waits_for_weights:
            key = ("engines", name, "sglang", WAITS_FOR_WEIGHTS)
            found = f"`{dotted(key)}` with `engines.{name}.model`"
            yield key, found, "engines that follow versions: this one would wait for ever", "remove the argument"


def _external_engines(config: RootConfig) -> Iterator[_Finding]:
    """What only a server that is started here can have."""
    for name, group in config.engines.items():
        for option in ("sglang", "env", "python"):
            if group.url is not None and getattr(group, option):
                found = f"`engines.{name}.{option}` with `engines.{name}.url`"
                remedy = f"start the server with it yourself, and remove `engines.{name}.{option}`"
                yield ("engines", name, option), found, "a server that is started here", remedy


def _engine_routers(config: RootConfig) -> Iterator[_Finding]:
    """Who asks a router does not know which engine answers, so it cannot keep the prefixes of versions apart."""
    for name, group in config.engines.items():
        option = "router" if group.router is not None else "start_router"
        through = group.router is not None or group.start_router is not None
        if through and group.pause == "in_place" and not group.sglang.get("disable-radix-cache"):
            found = f"`engines.{name}.{option}` with `engines.{name}.pause: in_place` and a prefix cache"
            remedy = f"set `engines.{name}.pause: retract`, or `engines.{name}.sglang.disable-radix-cache: true`"
            yield ("engines", name, option), found, "engines that hold no prefix of older weights", remedy


def _quantised_models(config: RootConfig) -> Iterator[_Finding]:
    """All engines that follow versions get the same tensors."""
    following = {name: group for name, group in config.engines.items() if group.model is None}
    first = next(iter(following), "")
    for name, group in config.engines.items():
        key: KeyPath = ("engines", name, "quantised_model")
        if group.model is not None and group.quantised_model is not None:
            found = f"`{dotted(key)}` with `engines.{name}.model`"
            yield key, found, "one of the two: an engine with `model` follows no versions", f"remove `{dotted(key)}`"
        elif group.model is None and group.quantised_model != following[first].quantised_model:
            found = f"`{dotted(key)}` other than `engines.{first}.quantised_model`"
            remedy = "name the same folder in both groups, or in none"
            yield key, found, "one form for all engines that follow versions: each is published once", remedy


def _quantised_at_load(config: RootConfig) -> Iterator[_Finding]:
    """An engine that quantises what it loads holds other parameters than versions bring."""
    for name, group in config.engines.items():
        key: KeyPath = ("engines", name, "sglang", "quantization")
        loader = group.sglang.get("load-format")
        if (
            group.model is None
            and group.quantised_model is None
            and "quantization" in group.sglang
            and loader != "flash_rl"
        ):
            found = f"`{dotted(key)}` without `engines.{name}.quantised_model`"
            remedy = f"export the start model (actorctl checkpoints export-hf), and name it in `engines.{name}.quantised_model`"
            yield key, found, "a model that is quantised already, for an engine that follows versions", remedy


def _devices(config: RootConfig) -> Iterator[_Finding]:
    """The devices of a group are shared out equally, and only `gpus` says which process sees which."""
    for key, group in device_groups(config).items():
        name = dotted(key)
        if group.instances and group.amount % group.instances:
            found = f"{group.amount} devices (`{name}.gpus`) for {group.instances} instances"
            yield (*key, "gpus"), found, "a multiple of the instances", f"set `gpus` to a multiple of {group.instances}"
        if group.amount and "CUDA_VISIBLE_DEVICES" in group.env:
            found = f"`{name}.env.CUDA_VISIBLE_DEVICES` with `{name}.gpus`"
            yield (*key, "env", "CUDA_VISIBLE_DEVICES"), found, "one of the two", "remove the variable: `gpus` sets it"


def _blobs(config: RootConfig) -> Iterator[_Finding]:
    """Each checkpoint actor has one store."""
    replicas, stores = config.blobs.replicas, config.checkpoint.count
    if replicas > stores:
        found = f"`blobs.replicas: {replicas}` with `checkpoint.count: {stores}`"
        remedy = f"raise `checkpoint.count` to {replicas}, or lower `blobs.replicas`"
        yield ("blobs", "replicas"), found, "a checkpoint actor for each copy", remedy


def _autoscale(config: RootConfig) -> Iterator[_Finding]:
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


def _enough(config: RootConfig) -> Iterator[_Finding]:
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


def _supervision(config: RootConfig) -> Iterator[_Finding]:
    s = config.supervisor
    if s.heartbeat_limit_s <= s.heartbeat_s:
        found = f"`supervisor.heartbeat_limit_s: {s.heartbeat_limit_s}` with `supervisor.heartbeat_s: {s.heartbeat_s}`"
        remedy = "raise `supervisor.heartbeat_limit_s`, or lower `supervisor.heartbeat_s`"
        yield ("supervisor", "heartbeat_limit_s"), found, "a limit above the interval", remedy
    if s.backoff_max_s < s.backoff_s:
        found = f"`supervisor.backoff_max_s: {s.backoff_max_s}` with `supervisor.backoff_s: {s.backoff_s}`"
        remedy = "raise `supervisor.backoff_max_s`, or lower `supervisor.backoff_s`"
        yield ("supervisor", "backoff_max_s"), found, "a bound of at least the first wait", remedy


_RULES: tuple[Callable[[RootConfig], Iterator[_Finding]], ...] = (
    _objective,
    _replicas,
    _recording,
    _age,
    algorithm_findings,
    _evaluated,
    _mixture,
    _ordered,
    _world,
    _sequence_length,
    _answers_fit,
    _evaluation,
    _evaluation_engines,
    _judges,
    _engine_arguments,
    _external_engines,
    _engine_routers,
    _quantised_models,
    _quantised_at_load,
    _devices,
    _blobs,
    _autoscale,
    _enough,
    _supervision,
)
