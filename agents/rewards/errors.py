"""What a ready-made reward cannot score, said so that the row or the configuration can be mended."""

from __future__ import annotations

from physarum.agents.errors import AgentError


class RewardError(AgentError, ValueError):
    """A row that lacks what its type needs, or names a type that is none."""


class BackendError(AgentError):
    """Base of what can go wrong between a reward and the service that it asks."""


class BackendRefusedError(BackendError):
    """The service answered 4xx or a redirect: asking again would not help, so it is not asked again."""


class BackendUnavailableError(BackendError):
    """The service gave no score within the attempts or the deadline."""


class BackendReplyError(BackendError):
    """The service answered 200 with something that is no score."""


class SandboxError(AgentError):
    """The sandbox itself did not start: the program was never run, so nothing is said about it."""
