"""What a ready-made reward cannot score, said so that the row or the configuration can be mended."""

from __future__ import annotations

from physarum.agents.errors import AgentError


class RewardError(AgentError, ValueError):
    """A row that lacks what its type needs, or names a type that is none."""
