"""`reward:` the workers that score executions."""

from __future__ import annotations

from pydantic import Field

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Count, Devices, Environment, Natural, Seconds, Section


class RewardConfig(Section):
    """`hook` is called `(execution, **args)`, sync or async; a call that outlives `timeout_s` is a failed try."""

    count: Natural = 1
    """Processes."""
    hook: Hook | None = None
    args: Arguments = Field(default_factory=dict)
    weights: dict[str, float] = Field(default_factory=dict)
    """Of a reward's named parts in its sum; a part without one weighs 1."""
    workers: Count = 1
    """Calls at once in one process."""
    timeout_s: Seconds = 30.0
    env: Environment = Field(default_factory=dict)
    gpus: Devices = 0
