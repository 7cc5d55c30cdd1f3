"""`evaluation:` held-out problems, scored outside the account of executions."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.rollout import SamplingConfig
from physarum.configs.types import Arguments, Count, Files, Seconds, Section, require_exactly_one


class EvaluationConfig(Section):
    """Exactly one of `hook` (called like a source's) and `data` (read with `source.columns`)."""

    alternatives: ClassVar[tuple[str, ...]] = ("hook", "data")

    hook: Hook | None = None
    data: Files | None = None
    args: Arguments = Field(default_factory=dict)
    problems: Count = 256
    at_start: bool = True
    at_end: bool = True
    every_versions: Count | None = None
    """Published versions between evaluations; null evaluates only at start and end."""
    sampling: SamplingConfig = SamplingConfig()
    timeout_s: Seconds = 600.0

    @model_validator(mode="after")
    def _one_origin(self) -> EvaluationConfig:
        require_exactly_one(self, self.alternatives)
        return self
