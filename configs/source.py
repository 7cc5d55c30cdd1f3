"""`source:` where the tasks come from."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Count, Files, Name, Section, require_exactly_one


class ColumnsConfig(Section):
    """The keys of a JSONL row that hold a task's parts. Only `prompt` must be present in every row."""

    prompt: str = "prompt"
    label: str = "label"
    metadata: str = "metadata"


class CurriculumConfig(Section):
    """A hook `(seed, **args)` that returns a `physarum.agents.protocols.Curriculum`."""

    hook: Hook
    args: Arguments = Field(default_factory=dict)


class SourceConfig(Section):
    """Exactly one of `hook` and `data`. A hook is called `(seed, **args)` and returns `hooks.Rows`."""

    alternatives: ClassVar[tuple[str, ...]] = ("hook", "data")

    name: Name = "main"
    hook: Hook | None = None
    data: Files | None = None
    """JSONL files or glob patterns."""
    args: Arguments = Field(default_factory=dict)
    group_size: Count = 8
    """Executions of one prompt; their rewards are compared with each other."""
    purpose: Name = "train"
    shuffle: bool = True
    epochs: Count | None = None
    """Passes over the data; null is endless."""
    columns: ColumnsConfig = ColumnsConfig()
    curriculum: CurriculumConfig | None = None
    """Which rows come next, learnt from how others came out; null issues them as they are."""

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        require_exactly_one(self, self.alternatives)
        return self
