"""`rollout:` the workers that turn tasks into trajectories."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from physarum.configs.hooks import Hook
from physarum.configs.sampling import SamplingConfig
from physarum.configs.types import Arguments, Count, Devices, Environment, Natural, Seconds, Section


class RoutingConfig(Section):
    """How an engine is chosen (docs/rollout.md): sessions and shared prefixes are followed near the lightest engine."""

    imbalance: Annotated[float, Field(ge=1)] = 1.25
    """Near is work up to this multiple of the lightest engine's, and `slack_tokens`."""
    slack_tokens: Natural = 8192
    prefix_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of a prompt that must be shared for its prefix to decide."""
    patience_s: Annotated[float, Field(ge=0)] = 2.0
    """How long a session waits for room on its own engine while another one has some."""
    breaker_failures: Count = 3
    """In a row: then an engine is left out. A refused connection is enough alone."""
    breaker_base_s: Seconds = 0.5
    """Before it is tried again; up to three times the wait before, at most `breaker_max_s`."""
    breaker_max_s: Seconds = 30.0


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
    """Of the episode's own clock, which stands still while it waits for an engine."""
    episode_tokens: Count | None = None
    """What the requests of an episode may generate in all; then they end as one does at its length. Null: no limit."""
    request_timeout_s: Seconds = 120.0
    """An engine's answer may take this long, or with `stream_tokens` be silent this long; then it is asked for anew. Longer
    than the longest answer takes: of one that came in one piece nothing is kept."""
    stream_tokens: Count | None = None
    """Engines answer in chunks of so many tokens, and what they sent before they died is kept. Null: in one piece."""
    room_timeout_s: Seconds = 3600.0
    """A request may wait this long for room on a saturated engine."""
    routing: RoutingConfig = RoutingConfig()
    env: Environment = Field(default_factory=dict)
    gpus: Devices = 0
