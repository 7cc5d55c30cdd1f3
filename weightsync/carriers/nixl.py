"""`nixl`: NVIDIA's inference transfer library (github.com/ai-dynamo/nixl) over UCX, which takes RDMA, shared memory or TCP.

An agent's metadata name its memory, so each ticket carries those of its moment. NIXL has no call that waits for a transfer: it
is asked for the state, at growing distances.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
import uuid
from typing import Any, Final

from physarum.weightsync.carriers.carrier import Place, address_of
from physarum.weightsync.errors import CarrierError

_log = logging.getLogger(__name__)

_MEMORY: Final = "DRAM"
_SHORTEST_S: Final = 0.0001
_LONGEST_S: Final = 0.005
_REMEMBERED: Final = 64
"""Metadata of others, which change with each version that they hold."""


class NixlCarrier:
    """One agent; its library is called by one thread at a time."""

    name: Final = "nixl"

    def __init__(self) -> None:
        """Raises CarrierError."""
        api = _api()
        try:
            self._agent: Any = api.nixl_agent(f"physarum-{uuid.uuid4().hex}", api.nixl_agent_config(backends=["UCX"]))
        except RuntimeError as error:
            raise CarrierError(f"NIXL does not start with UCX: {error}") from error
        self._guard = threading.Lock()
        self._registered: dict[int, tuple[Any, int]] = {}
        """What each address was registered as, and how often."""
        self._peers: dict[str, str] = {}

    def register(self, memory: memoryview) -> Place:
        address = address_of(memory)
        with self._guard:
            known, count = self._registered.get(address, (None, 0))
            if not count:
                try:
                    known = self._agent.register_memory([(address, memory.nbytes, 0, "")], _MEMORY)
                except Exception as error:
                    raise CarrierError(f"NIXL cannot register {memory.nbytes} bytes: {error}") from error
            self._registered[address] = (known, count + 1)
            reach = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return Place(reach, address, memory.nbytes)

    def unregister(self, place: Place) -> None:
        with self._guard:
            known, count = self._registered.pop(place.address, (None, 0))
            if count > 1:
                self._registered[place.address] = (known, count - 1)
            elif count:
                self._forget(known)

    def read(self, place: Place, offset: int, target: memoryview, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        handle = None
        try:
            with self._guard:
                handle = self._begin(place, offset, target)
                state = self._agent.transfer(handle)
            wait_s = _SHORTEST_S
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise CarrierError(f"NIXL did not read {target.nbytes} bytes within {timeout_s:g} s")
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_S)
                with self._guard:
                    state = self._agent.check_xfer_state(handle)
        except CarrierError:
            raise
        except Exception as error:
            raise CarrierError(f"NIXL could not read {target.nbytes} bytes: {type(error).__name__} {error}") from error
        finally:
            if handle is not None:
                self._release(handle)
        if state != "DONE":
            raise CarrierError(f"NIXL could not read {target.nbytes} bytes: it ended as {state}")

    def close(self) -> None:
        with self._guard:
            for known, _ in self._registered.values():
                self._forget(known)
            self._registered.clear()

    def _begin(self, place: Place, offset: int, target: memoryview) -> Any:
        if place.reach not in self._peers:
            self._peers[place.reach] = self._agent.add_remote_agent(base64.b64decode(place.reach))
            for oldest in list(self._peers)[:-_REMEMBERED]:
                del self._peers[oldest]
        here = self._agent.get_xfer_descs([(address_of(target), target.nbytes, 0)], _MEMORY)
        there = self._agent.get_xfer_descs([(place.at(offset, target.nbytes), target.nbytes, 0)], _MEMORY)
        return self._agent.initialize_xfer("READ", here, there, self._peers[place.reach], b"")

    def _release(self, handle: Any) -> None:
        """One that is under way still may refuse to be let go: that must not hide why it was given up."""
        try:
            with self._guard:
                self._agent.release_xfer_handle(handle)
        except Exception as error:  # noqa: BLE001 - the library's own kinds; it ends with the process
            _log.warning("NIXL does not let go of a transfer: %s: %s", type(error).__name__, error)

    def _forget(self, known: Any) -> None:
        try:
            self._agent.deregister_memory(known)
        except Exception as error:  # noqa: BLE001 - the library's own kinds; it ends with the process
            _log.warning("NIXL does not give back registered memory: %s", error)


def _api() -> Any:
    """Its module, which is named by the CUDA that it was built for unless the package `nixl` chooses."""
    try:
        from nixl import _api as api
    except ImportError:
        from nixl_cu12 import _api as api
    return api
