"""Names that actors have beside those of engines: an actor is known by its instance, `NAME-NUMBER`, in all of a run."""

from __future__ import annotations

import re
from typing import Final

ROLES: Final = (
    "autoscaler",
    "checkpoint",
    "engine",
    "evaluator",
    "janitor",
    "node",
    "recorder",
    "reward",
    "rollout",
    "router",
    "source",
    "supervisor",
    "trainer",
)
_COMPOSED: Final = re.compile(r"(router|trainer)-.+|.+-\d+-node")
"""`router-policy-0`, `trainer-solver-0`, `policy-0-node-1`."""


def is_taken(group: str) -> bool:
    """Whether engines of a group of this name would be taken for other actors."""
    return group in ROLES or _COMPOSED.fullmatch(group) is not None
