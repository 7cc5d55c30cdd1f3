"""`mooncake`: Mooncake's transfer engine (github.com/kvcache-ai/Mooncake), RDMA where the host has such devices, else TCP.

Processes find each other without a metadata server (P2PHANDSHAKE), by host and port. The engine has one deadline for all
transfers (MC_TRANSFER_TIMEOUT, by default 30 s); a shorter one cannot be asked for.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from physarum.weightsync.carriers.carrier import Place, address_of
from physarum.weightsync.errors import CarrierError

_log = logging.getLogger(__name__)

_HANDSHAKE: Final = "P2PHANDSHAKE"


class MooncakeCarrier:
    """`host`: under which others reach this one; `protocol`: rdma or tcp."""

    name: Final = "mooncake"

    def __init__(self, host: str, protocol: str) -> None:
        """Raises CarrierError."""
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, _HANDSHAKE, protocol, ""):
            raise CarrierError(
                f"Mooncake's transfer engine does not start on {host} with protocol {protocol}; see its log"
            )
        self._reach = f"{host}:{self._engine.get_rpc_port()}"
        self._guard = threading.Lock()
        self._registered: dict[int, int] = {}
        """How often each address is; the engine takes it once."""

    def register(self, memory: memoryview) -> Place:
        place = Place(self._reach, address_of(memory), memory.nbytes)
        with self._guard:
            count = self._registered.get(place.address, 0)
            if not count and self._engine.register_memory(place.address, place.size):
                raise CarrierError(
                    f"Mooncake cannot register {place.size} bytes; raise the limit of locked memory (ulimit -l)"
                )
            self._registered[place.address] = count + 1
        return place

    def unregister(self, place: Place) -> None:
        with self._guard:
            count = self._registered.pop(place.address, 0)
            if count > 1:
                self._registered[place.address] = count - 1
            elif count and self._engine.unregister_memory(place.address):
                _log.warning("Mooncake does not give back %d bytes at %#x", place.size, place.address)

    def read(self, place: Place, offset: int, target: memoryview, timeout_s: float) -> None:
        where = place.at(offset, target.nbytes)
        if self._engine.transfer_sync_read(place.reach, address_of(target), where, target.nbytes):
            raise CarrierError(f"Mooncake could not read {target.nbytes} bytes from {place.reach}")

    def close(self) -> None:
        with self._guard:
            for address in self._registered:
                self._engine.unregister_memory(address)
            self._registered.clear()
