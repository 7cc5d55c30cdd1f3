"""Which actor works for which policy, and under which names a policy is known on the bus.

Invariant: the run's own policy has the names that it had when there was no other.
"""

from __future__ import annotations

from typing import Final

from physarum.actors.engine.nodes import engine_of
from physarum.configs.root import RootConfig

TRAINER: Final = "trainer"
"""The role, and the lease of the run's own policy."""


def trainer_instance(policy: str) -> str:
    """The name of a policy's trainer: `trainer-0`, `trainer-solver-0`."""
    return f"{named(TRAINER, policy)}-0"


def named(name: str, policy: str) -> str:
    """A name that each policy has for itself (a lease, a file): of a further policy with its own name behind it."""
    return f"{name}-{policy}" if policy else name


def key(name: str, policy: str) -> tuple[str, ...]:
    """The same of a register's key."""
    return (name, policy) if policy else (name,)


def policy_of(config: RootConfig, role: str, instance: str) -> str:
    """For which further policy an actor works; "" for the run's own, and for all."""
    group = instance.rpartition("-")[0]
    match role:
        case "trainer":
            return group.removeprefix(f"{TRAINER}-") if group != TRAINER else ""
        case "engine":
            return _served(config, group)
        case "node":
            return _served(config, engine_of(instance)[0].rpartition("-")[0])
        case _:
            return ""


def _served(config: RootConfig, group: str) -> str:
    return "" if config.engines[group].model is not None else config.policy_of(group)
