"""`environments:` what episodes lease while they run: sandboxes, containers, virtual machines, devices; by class."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Count, Natural, Seconds, Section, refuse


class EnvironmentClass(Section):
    """Equal instances, of which at most `capacity` are there at the same time in the whole run."""

    kind: Literal["cpu", "gpu", "container", "vm"] = "container"
    """What an instance takes; announced with the numbers of each class."""
    hook: Hook
    """`async (place, **args)`: starts one and returns it; what it returns has `async close()`. `place` is an
    `agents.environments.pool.Place`."""
    args: Arguments = Field(default_factory=dict)
    capacity: Count
    prewarm: Natural = 0
    """Instances that a rollout actor in use has started before they are asked for; places of the capacity."""
    idle_ttl_s: Seconds = 300.0
    """One that nobody leased for so long is closed."""
    reuse: bool = False
    """An episode that ended well leaves its instance to the next, which must find nothing of it there; else each gets a fresh
    one."""
    start_timeout_s: Seconds = 120.0
    """For starting one, and for closing it."""
    wait_s: Seconds = 3600.0
    """An episode waits so long for a place, with its clock standing still; then its try has failed."""

    @model_validator(mode="after")
    def _fits(self) -> EnvironmentClass:
        if self.prewarm > self.capacity:
            found = f"prewarm {self.prewarm} of capacity {self.capacity}"
            raise refuse("`prewarm` of at most `capacity`", "lower `prewarm`", found=found)
        return self
