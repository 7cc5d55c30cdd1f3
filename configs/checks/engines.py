"""Groups of engines that cannot do what they are asked for: routers, pairs of prefill and decode servers, encoders.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from physarum.configs.engine import EngineConfig
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig
from physarum.configs.servers import PAIRED

_BACKEND: Final = "disaggregation-transfer-backend"
_Finding = tuple[str, str, str, str]
"""Option of the group to point at, found, expected, remedy."""


def check_groups(config: RootConfig) -> Iterator[Problem]:
    """Every group by itself."""
    for name, group in config.engines.items():
        for rule in _RULES:
            for option, found, expected, remedy in rule(group):
                key: KeyPath = ("engines", name, option)
                where = config.origins.where(key)
                yield Problem(Severity.ERROR, where, found, expected, f"{remedy} in `engines.{name}`")
    yield from _recorded_choices(config)


def _recorded_choices(config: RootConfig) -> Iterator[Problem]:
    """What an engine chose is reported for its own tokens: a pair would report the decode server's alone."""
    for name, group in config.engines.items():
        replay = config.of_policy("" if group.model is not None else config.policy_of(name)).trainer.algorithm.replay
        if group.paired and group.model is None and (replay.routing == "R3" or replay.nucleus):
            where = config.origins.where(("engines", name, "servers"))
            found = "prefill and decode servers with `trainer.algorithm.replay` of what engines choose"
            remedy = "set `replay.routing` to R2 or off and `replay.nucleus: false`, or remove the roles"
            yield Problem(Severity.ERROR, where, found, "servers that report all of a request", remedy)


def _routers(group: EngineConfig) -> Iterator[_Finding]:
    """One router, in front of engines that rollout actors ask."""
    if group.start_router is None:
        return
    if group.router is not None:
        yield "start_router", "`start_router` with `router`", "one of them", "remove one"
    if group.model is not None:
        found = "`start_router` with `model`"
        yield "start_router", found, "engines that follow the policy: only they are asked through it", "remove it"


def _pairs(group: EngineConfig) -> Iterator[_Finding]:
    """Prefill and decode servers: what asks one server alone, or lets a few of them be of another version, does not fit."""
    if not group.paired:
        return
    beside = {
        "model": (group.model, "a group that follows versions: who asks a frozen model asks one server"),
        "canary": (group.canary, "servers that take a version together: a canary would have no other half"),
        "router": (group.router, "pairs that rollout actors choose, who know the versions of both"),
        "start_router": (group.start_router, "pairs that rollout actors choose, who know the versions of both"),
    }
    for option, (given, expected) in beside.items():
        if given is not None:
            yield option, f"`{option}` with prefill and decode servers", expected, f"remove `{option}`, or the roles"
    backends = {_backend(group, index) for index, part in enumerate(group.servers) if part.role in PAIRED}
    if len(backends) > 1:
        found = f"the transfer backends {', '.join(sorted(backends))}"
        yield "servers", found, "one: KV goes from one to the other", f"set `sglang.{_BACKEND}`, for all parts,"
    if "fake" in backends:
        yield "servers", f"`{_BACKEND}: fake`", "a backend that moves KV", "name another one"


def _backend(group: EngineConfig, index: int) -> str:
    return str({**group.sglang, **group.servers[index].sglang}.get(_BACKEND) or "mooncake")


def _encoders(group: EngineConfig) -> Iterator[_Finding]:
    """Images come to frozen models alone: rollouts are of tokens, and no model with an encoder is trained."""
    if group.encodes and group.model is None:
        expected = "a frozen model, asked with images: what is trained has no encoder (docs/models.md)"
        yield "servers", "`role: encoder` without `model`", expected, "add `model`, or remove the part"


def _nodes(group: EngineConfig) -> Iterator[_Finding]:
    """Ranks on other hosts have no device in common with node 0."""
    if all(part.nodes == 1 for part in group.parts):
        return
    if group.transport in ("ipc", "nccl"):
        found = f"`transport: {group.transport}` with `nodes`"
        yield "transport", found, "a folder that all nodes read", "set `transport: auto`, which takes it,"
    if group.url is not None:
        yield "nodes", "`nodes` with `url`", "servers that are started here", "remove `nodes`"


_RULES: tuple[Callable[[EngineConfig], Iterator[_Finding]], ...] = (_routers, _pairs, _encoders, _nodes)
