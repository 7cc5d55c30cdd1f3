"""What can end a call of the reward hook, apart from what the hook itself raises."""

from __future__ import annotations

from physarum.actors.errors import ActorError, HookFailedError


class HookTimeoutError(HookFailedError):
    """The hook did not return within reward.timeout_s; its process was killed."""


class HookDiedError(HookFailedError):
    """The hook's process ended during the call: os._exit, a crash, or the kernel's memory killer."""


class ServiceUnavailableError(HookFailedError):
    """The hook gave up on a service that it asks, of this run or another."""


class JudgesAwayError(HookFailedError):
    """The actor drains while no engine is ready that the hook would ask: that is nobody's failed try."""


class HookProcessError(ActorError):
    """A hook process did not start, or spoke nonsense."""
