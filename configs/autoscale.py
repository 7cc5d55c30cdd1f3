"""`autoscale:` groups of actors that grow while they are pressed and shrink while they idle."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from physarum.configs.types import Count, Name, Natural, Seconds, Section, refuse

_Share = Annotated[float, Field(ge=0, le=1)]


class GroupScaling(Section):
    """One group (`rollout`, or one of engines that are started here) between `least` and `most` actors."""

    least: Natural = 1
    most: Count
    up_after_s: Seconds = 30.0
    """So long it must be pressed before it grows, by `step` of its size."""
    down_after_s: Seconds = 300.0
    """So long it must idle before one actor leaves."""
    step: Annotated[float, Field(gt=0, le=1)] = 0.25
    high: _Share = 0.85
    """Engines: pressed while the mean share of their KV memory that is in use is above it, or episodes wait for a place.
    Rollouts: pressed while more than this share of the slots is taken and tasks wait, unless the engines are pressed."""
    low: _Share = 0.4
    """Idle below it (of KV memory, of slots) while nothing waits."""

    @model_validator(mode="after")
    def _ordered(self) -> GroupScaling:
        if self.least > self.most:
            raise refuse("`least` of at most `most`", "swap them", found=f"least {self.least}, most {self.most}")
        if self.low >= self.high:
            raise refuse("`low` below `high`", "leave room between them", found=f"low {self.low}, high {self.high}")
        return self


class AutoscaleConfig(Section):
    """By group. With `dry_run` it only says what it would do."""

    groups: dict[Name, GroupScaling] = Field(min_length=1)
    dry_run: bool = True
