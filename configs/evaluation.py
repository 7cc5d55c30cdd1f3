"""`evaluation:` held-out problems, scored outside the account of executions."""

from __future__ import annotations

from physarum.configs.rollout import SamplingConfig
from physarum.configs.rows import RowsConfig
from physarum.configs.types import Count, Seconds


class EvaluationConfig(RowsConfig):
    """Rows as a source has them; `columns` and `chat` are the source's where they are null."""

    problems: Count = 256
    at_start: bool = True
    at_end: bool = True
    every_versions: Count | None = None
    """Published versions between evaluations; null evaluates only at start and end."""
    sampling: SamplingConfig = SamplingConfig()
    timeout_s: Seconds = 600.0
