"""`reward:` the workers that score executions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.reward_types import canonical, remedy_for
from physarum.configs.types import (
    Arguments,
    Count,
    Devices,
    Environment,
    Natural,
    Seconds,
    Section,
    refuse,
    require_exactly_one,
)


def _canonical(value: object) -> object:
    """slime's names as ours; an unknown one is refused with the nearest."""
    if not isinstance(value, str):
        return value
    known = canonical(value)
    if known is None:
        raise refuse("a ready-made reward (docs/rewards.md)", remedy_for(value), f"`{value}`")
    return known


RewardType = Annotated[str, BeforeValidator(_canonical)]


class GroupRewardConfig(Section):
    """Exactly one of `hook` and `type`: what scores the members of a group against each other."""

    alternatives: ClassVar[tuple[str, ...]] = ("hook", "type")

    hook: Hook | None = None
    """Called `(executions, **args)`, sync or async; returns a list with one reward for each. They are a group's members in
    their order; one whose reward was given by `reward` itself carries it."""
    type: Literal["tournament"] | None = None
    args: Arguments = Field(default_factory=dict)
    partitions: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts of the groups, each gathered and scored by one reward process: at most so many of them share the work."""
    timeout_s: Seconds = 300.0
    """For one group."""
    wait_s: Seconds = 900.0
    """After the last member came; then the group is scored and trained without those that did not come. `groups.enough` and
    `groups.deadline_s` hold too."""

    @model_validator(mode="after")
    def _one(self) -> GroupRewardConfig:
        require_exactly_one(self, self.alternatives)
        return self


class RewardConfig(Section):
    """At most one of `hook`, `type` and `custom_rm`. A call that outlives `timeout_s` is a failed try."""

    alternatives: ClassVar[tuple[str, ...]] = ("hook", "type", "custom_rm")

    count: Natural = 1
    """Processes."""
    hook: Hook | None = None
    """Called `(execution, **args)`, sync or async."""
    type: RewardType | None = None
    """A ready-made reward (docs/rewards.md); `args` are its options."""
    custom_rm: Hook | None = None
    """A function written for slime's `--custom-rm-path`: `async (args, sample)`; `args` become attributes of its first
    parameter."""
    batched: bool = False
    """`custom_rm` takes a list of an execution's samples, and returns as many rewards."""
    args: Arguments = Field(default_factory=dict)
    row_types: dict[RewardType, Arguments] = Field(default_factory=dict)
    """With `type`: options of the types that rows name in `metadata.rm_type`."""
    group: GroupRewardConfig | None = None
    """Scores the groups of training executions; takes the place of what the other keys gave, which evaluations keep."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Of a reward's named parts in its sum; a part without one weighs 1."""
    workers: Count = 1
    """Hook processes of one reward process."""
    concurrency: Count = 1
    """Calls at once in one hook process, for hooks that wait for others (async): more than 1 runs them in one event loop."""
    timeout_s: Seconds = 30.0
    memory_mib: Count | None = None
    """Address space of one hook process: beyond it a call gets MemoryError. Null: no limit (CUDA maps more than it uses)."""
    total_mib: Count | None = None
    """Memory that a hook process holds with all that it started: beyond it they are killed, and the call is a failed try."""
    children: Count = 1024
    """Processes that a hook process may have started at a time, the same."""
    env: Environment = Field(default_factory=dict)
    gpus: Devices = 0

    @model_validator(mode="after")
    def _one_scorer(self) -> RewardConfig:
        given = [name for name in self.alternatives if getattr(self, name) is not None]
        if len(given) > 1:
            found = " and ".join(f"`{name}`" for name in given)
            raise refuse("at most one of them", "keep one of them and remove the others", found)
        if self.row_types and self.type is None:
            raise refuse("`row_types` with `type`", "add `type`, or remove `row_types`", "`row_types` without it")
        if self.batched and self.custom_rm is None:
            raise refuse("`batched` with `custom_rm`", "add `custom_rm`, or remove `batched`", "`batched` without it")
        return self

    @property
    def processes(self) -> int:
        """Hook processes of the whole run."""
        return max(1, self.count) * self.workers

    @property
    def partitions(self) -> tuple[int | None, ...]:
        """Of the training executions; (None,): they are not parted."""
        count = 1 if self.group is None else self.group.partitions
        return (None,) if count == 1 else tuple(range(count))

    @property
    def scores(self) -> bool:
        """Whether anything is scored here; else executions pass through."""
        return any(getattr(self, name) is not None for name in self.alternatives)
