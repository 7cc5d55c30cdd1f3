"""`source:` where the tasks come from."""

from __future__ import annotations

from pydantic import Field

from physarum.configs.hooks import Hook
from physarum.configs.rows import RowsConfig
from physarum.configs.types import Arguments, Count, Name, Section


class CurriculumConfig(Section):
    """A hook `(seed, **args)` that returns a `physarum.agents.protocols.Curriculum`."""

    hook: Hook
    args: Arguments = Field(default_factory=dict)


class SourceConfig(RowsConfig):
    """Rows, and how they become tasks."""

    name: Name = "main"
    group_size: Count = 8
    """Executions of one prompt; their rewards are compared with each other."""
    purpose: Name = "train"
    shuffle: bool = True
    epochs: Count | None = None
    """Passes over the data; null is endless."""
    curriculum: CurriculumConfig | None = None
    """Which rows come next, learnt from how others came out; null issues them as they are."""
