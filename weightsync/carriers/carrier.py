"""The interface of all carriers: a holder registers a version's memory and tells where it is; others read there.

    holder: register(file) -> Place --ticket--> reader: register(filling), read(place, offset) -> bytes in their place

Nobody at the holder takes part in a read, so nothing says that the bytes are still those: whoever reads verifies them. Calls
block and may come from any thread.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from physarum.weightsync.errors import CarrierError


class Place(msgspec.Struct, frozen=True):
    """Registered memory of another process: how to reach that process, in the carrier's own words, and the first address."""

    reach: str
    address: int
    size: int

    def at(self, offset: int, count: int) -> int:
        """The address of `count` bytes of it. Raises CarrierError where they are not all in it."""
        if not 0 <= offset <= offset + count <= self.size:
            raise CarrierError(f"bytes {offset} to {offset + count} are asked for, of memory of {self.size}")
        return self.address + offset


class Carrier(Protocol):
    """One process's."""

    @property
    def name(self) -> str:
        """As in `checkpoint.carrier`."""

    def register(self, memory: memoryview) -> Place:
        """Others may read it until `unregister`; it may be read into. It must stay mapped. Raises CarrierError."""

    def unregister(self, place: Place) -> None:
        """Nobody reads it any more. What cannot be given back is logged."""

    def read(self, place: Place, offset: int, target: memoryview, timeout_s: float) -> None:
        """Fills `target`, a part of registered memory, from another's. Raises CarrierError, also at the deadline."""

    def close(self) -> None:
        """Gives back everything that was registered."""


def address_of(memory: memoryview) -> int:
    """Where it begins in this process."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)
