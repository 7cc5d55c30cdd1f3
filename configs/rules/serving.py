"""Groups of engines: what is set elsewhere, what follows versions, what a server at a URL cannot have.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from physarum.configs.devices import device_groups
from physarum.configs.instance_names import is_taken
from physarum.configs.origin import KeyPath, dotted
from physarum.configs.placement import machine_names
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import ClassifierReward, ServedReward
from physarum.configs.root import RootConfig
from physarum.configs.rules.finding import Finding, Rule
from physarum.configs.sglang_arguments import RESERVED, WAITS_FOR_WEIGHTS


def _judges(config: RootConfig) -> Iterator[Finding]:
    """A judge is an engine of this run that stays as it is; a classifier is served as one, and read with its own tokenizer."""
    for key, options in given_options(config.reward, ServedReward):
        named, place = options.engine, (*key, "engine")
        if named is not None and (named not in config.engines or config.engines[named].model is None):
            remedy = f"add `engines.{named}.model`, or name a group that has a model of its own"
            found = f"`{dotted(place)}: {named}` without `engines.{named}.model`"
            yield place, found, "a group of engines with a model of its own", remedy
        elif isinstance(options, ClassifierReward):
            yield from _classifier(config, key, options)


def _classifier(config: RootConfig, key: KeyPath, options: ClassifierReward) -> Iterator[Finding]:
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


def _group_names(config: RootConfig) -> Iterator[Finding]:
    """Engines are `GROUP-NUMBER`: two actors of one name would be one to everybody."""
    for name in filter(is_taken, config.engines):
        found = f"`engines.{name}`"
        yield (
            ("engines", name),
            found,
            "a name that no other actor has",
            f"call the group something else: `{name}-engines`",
        )


def _engine_arguments(config: RootConfig) -> Iterator[Finding]:
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


def _external_engines(config: RootConfig) -> Iterator[Finding]:
    """What only a server that is started here can have."""
    for name, group in config.engines.items():
        for option in ("sglang", "env", "python"):
            if group.url is not None and getattr(group, option):
                found = f"`engines.{name}.{option}` with `engines.{name}.url`"
                remedy = f"start the server with it yourself, and remove `engines.{name}.{option}`"
                yield ("engines", name, option), found, "a server that is started here", remedy


def _engine_routers(config: RootConfig) -> Iterator[Finding]:
    """Who asks a router does not know which engine answers, so it cannot keep the prefixes of versions apart."""
    for name, group in config.engines.items():
        option = "router" if group.router is not None else "start_router"
        through = group.router is not None or group.start_router is not None
        if through and group.pause == "in_place" and not group.sglang.get("disable-radix-cache"):
            found = f"`engines.{name}.{option}` with `engines.{name}.pause: in_place` and a prefix cache"
            remedy = f"set `engines.{name}.pause: retract`, or `engines.{name}.sglang.disable-radix-cache: true`"
            yield ("engines", name, option), found, "engines that hold no prefix of older weights", remedy


def _quantised_models(config: RootConfig) -> Iterator[Finding]:
    """All engines that follow the versions of a policy get the same tensors."""
    firsts: dict[str, str] = {}
    for name, group in config.engines.items():
        first = name if group.model is not None else firsts.setdefault(config.policy_of(name), name)
        key: KeyPath = ("engines", name, "quantised_model")
        if group.model is not None and group.quantised_model is not None:
            found = f"`{dotted(key)}` with `engines.{name}.model`"
            yield key, found, "one of the two: an engine with `model` follows no versions", f"remove `{dotted(key)}`"
        elif group.model is None and group.quantised_model != config.engines[first].quantised_model:
            found = f"`{dotted(key)}` other than `engines.{first}.quantised_model`"
            remedy = "name the same folder in both groups, or in none"
            yield key, found, "one form for all engines that follow versions: each is published once", remedy


def _quantised_at_load(config: RootConfig) -> Iterator[Finding]:
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


def _devices(config: RootConfig) -> Iterator[Finding]:
    """The devices of a group are shared out equally, and only `gpus` says which process sees which."""
    on_each = (
        [device_groups(config, name) for name in machine_names(config)] if config.machines else [device_groups(config)]
    )
    seen = {(key, group.instances): group for groups in on_each for key, group in groups.items()}
    for (key, _), group in seen.items():
        name = dotted(key)
        if group.instances and group.amount % group.instances:
            found = f"{group.amount} devices (`{name}.gpus`) for {group.instances} instances"
            yield (*key, "gpus"), found, "a multiple of the instances", f"set `gpus` to a multiple of {group.instances}"
        if group.amount and "CUDA_VISIBLE_DEVICES" in group.env:
            found = f"`{name}.env.CUDA_VISIBLE_DEVICES` with `{name}.gpus`"
            yield (*key, "env", "CUDA_VISIBLE_DEVICES"), found, "one of the two", "remove the variable: `gpus` sets it"


def _mirrored(config: RootConfig) -> Iterator[Finding]:
    """What comes out of the object store is what was copied there, when it was."""
    kept_aside = None if config.evaluation is None else config.evaluation.engines
    for name, group in config.engines.items():
        if group.weights_from != "mirror":
            continue
        key: KeyPath = ("engines", name, "weights_from")
        found = f"`{dotted(key)}: mirror`"
        if config.checkpoint.versions is None:
            yield (
                key,
                f"{found} without `checkpoint.versions`",
                "a store to read from",
                "add `checkpoint.versions.mirror`",
            )
        if group.transport == "nccl":
            where = f"`engines.{name}.transport: nccl`"
            yield key, f"{found} with {where}", "one of the two ways", f"remove {where}, or `{dotted(key)}`"
        if name == kept_aside:
            expected = "the service: each version that is evaluated must be had"
            yield key, f"{found} with `evaluation.engines: {name}`", expected, f"remove `{dotted(key)}`"


RULES: tuple[Rule, ...] = (
    _judges,
    _group_names,
    _engine_arguments,
    _external_engines,
    _engine_routers,
    _quantised_models,
    _quantised_at_load,
    _mirrored,
    _devices,
)
