"""`rollout:` the workers that turn tasks into trajectories."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Count, Devices, Environment, Natural, Seconds, Section


class SamplingConfig(Section):
    """How tokens are drawn. Temperature 0 is refused: greedy tokens carry no log-probability to learn from."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 keeps the whole vocabulary."""
    max_new_tokens: Count = 256
    """Per request to an engine."""
    stop_token_ids: tuple[Natural, ...] = ()


class RolloutConfig(Section):
    """`generate` is an async hook `(task, client, **args)`."""

    count: Natural = 1
    """Processes."""
    slots: Count = 32
    """Episodes at once in one process."""
    generate: Hook | None = None
    args: Arguments = Field(default_factory=dict)
    sampling: SamplingConfig = SamplingConfig()
    episode_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 120.0
    env: Environment = Field(default_factory=dict)
    gpus: Devices = 0
