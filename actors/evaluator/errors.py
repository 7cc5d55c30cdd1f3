"""What keeps an evaluation from being made."""

from __future__ import annotations

from physarum.actors.errors import UnrecoverableError


class NoProblemError(UnrecoverableError):
    """The evaluation's hook or data gives no usable problem."""
