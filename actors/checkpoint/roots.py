"""What keeps a blob: every reference in the streams, and every one in the archive of samples.

Checkpoints and claims hold none of their own: a checkpoint's cursor names sequences of SAMPLES, which is trimmed only below
every kept one, and a claimed message is in its stream until it is acknowledged.
"""

from __future__ import annotations

import asyncio

from physarum.actors.context import Context
from physarum.actors.errors import ActorError
from physarum.actors.tools.archive import Archive, SegmentFile
from physarum.actors.wire import reference
from physarum.bus import log
from physarum.bus.blob_sweep import referenced


class RootsIncompleteError(ActorError):
    """Not every reference can be read from here, so nothing may be removed."""


class Roots:
    """The references of one run. Segments of the archive never change, so each is read once."""

    def __init__(self, context: Context) -> None:
        self._bus = context.bus
        self._archive = Archive(context.folder.archive)
        self._archives = context.config.samples.keep != "floor"
        self._known: dict[str, frozenset[str]] = {}

    async def mark(self) -> set[str]:
        """Raises RootsIncompleteError, ArchiveAlteredError, or an error of the bus."""
        live = await referenced(self._bus)
        # After SAMPLES was read: what is trimmed meanwhile is in the archive before.
        state = await log.state(self._bus, "samples")
        return live | await asyncio.to_thread(self._archived, state.first)

    def _archived(self, first: int) -> set[str]:
        segments = self._archive.segments()
        through = max((segment.last for segment in segments), default=0)
        if self._archives and through < first - 1:
            raise RootsIncompleteError(
                f"SAMPLES begins at {first} and {self._archive.folder} ends at {through}; expected the samples between there"
                " (samples.keep). Run a checkpoint actor on the machine of the trainer, which writes the archive"
            )
        self._known = {segment.path.name: self._of(segment) for segment in segments}
        return set().union(*self._known.values())

    def _of(self, segment: SegmentFile) -> frozenset[str]:
        known = self._known.get(segment.path.name)
        if known is not None:
            return known
        try:
            entries = self._archive.read(segment)
        except FileNotFoundError:
            return frozenset()  # dropped since it was listed
        return frozenset(ref.digest for entry in entries if (ref := reference(entry.headers)) is not None)
