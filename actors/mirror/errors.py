"""What goes wrong with a mirror: what another try may mend, and what it cannot."""

from __future__ import annotations

from physarum.actors.errors import ActorError, UnrecoverableError


class MirrorError(ActorError):
    """The object store cannot be reached, refused, or fell silent."""


class MirrorUnfitError(UnrecoverableError):
    """The mirror does not hold the checkpoint whole, holds other bytes, or is of a scheme that cannot be opened here."""
