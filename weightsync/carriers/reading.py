"""Chunks by a carrier, straight into the memory where they belong: as ChunkReader, for one ticket of one holder. Blocking.

A chunk is taken as a whole, never as a difference, and is verified like any other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from physarum.weightsync.carriers.carrier import Carrier
from physarum.weightsync.carriers.ticket import Ticket
from physarum.weightsync.chunk_reader import Base, Difference
from physarum.weightsync.digest import verify
from physarum.weightsync.errors import CarrierError, ChunkMissingError, ServiceUnreachableError


class CarriedReader:
    """Reads from the holder at `url` while its ticket lasts; the target is registered with the carrier."""

    def __init__(
        self, url: str, carrier: Carrier, ticket: Ticket, offsets: Mapping[str, int], timeout_s: float
    ) -> None:
        self.url = f"{url} by {carrier.name}"
        self._carrier = carrier
        self._ticket = ticket
        self._offsets = offsets
        self._timeout_s = timeout_s
        self.failed = False
        """Whether a read did: it may be under way still, so its ticket must last."""
        self._until = time.monotonic() + ticket.lease_s

    def read_into(self, digest: str, target: memoryview, base: Base | None = None) -> Difference | None:
        """As ChunkReader.read_into. Raises ChunkMissingError, ChunkAlteredError, ServiceUnreachableError."""
        offset = self._offsets.get(digest)
        if offset is None:
            raise ChunkMissingError(f"{self.url} does not hold chunk {digest}")
        if time.monotonic() > self._until:
            raise ServiceUnreachableError(f"the ticket of {self._ticket.label} from {self.url} is over")
        try:
            self._carrier.read(self._ticket.place, offset, target, self._timeout_s)
        except CarrierError as error:
            self.failed = True
            raise ServiceUnreachableError(f"chunk {digest} from {self.url}: {error}") from error
        verify(target, digest, f"chunk from {self.url}")
        return None

    def close(self) -> None:
        """What is under way ends by its deadline."""
