"""What ends an actor, and the exit status that tells the supervisor what to do about it."""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_UNRECOVERABLE: Final = 78
"""Starting the same actor again cannot help (EX_CONFIG): the supervisor ends the run with this actor's name."""


class ActorError(Exception):
    """Base of what actors raise on purpose; the process ends and is started again by policy."""


class UnrecoverableError(ActorError):
    """A new start would fail in the same way: wrong configuration, missing files, an incompatible server."""


class BadHookResultError(ActorError):
    """A user's hook returned something that its protocol does not allow."""


class HookFailedError(ActorError):
    """A user's hook raised, or did not answer within its deadline."""
