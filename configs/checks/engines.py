"""Groups of engines that cannot do what they are asked for: routers, pairs of prefill and decode servers, encoders.

Invariant: each problem names both options that do not fit, and how to make them fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from physarum.configs.engine import EngineConfig
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig

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


def _routers(group: EngineConfig) -> Iterator[_Finding]:
    """One router, in front of engines that rollout actors ask."""
    if group.start_router is None:
        return
    if group.router is not None:
        yield "start_router", "`start_router` with `router`", "one of them", "remove one"
    if group.model is not None:
        found = "`start_router` with `model`"
        yield "start_router", found, "engines that follow the policy: only they are asked through it", "remove it"


_RULES: tuple[Callable[[EngineConfig], Iterator[_Finding]], ...] = (_routers,)
