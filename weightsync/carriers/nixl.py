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
from collections import Counter
from typing import Any, Final

from physarum.weightsync.carriers.carrier import Place, address_of
from physarum.weightsync.errors import CarrierError

_log = logging.getLogger(__name__)

_MEMORY: Final = "DRAM"
_SHORTEST_S: Final = 0.0001
_LONGEST_S: Final = 0.005
_REMEMBERED: Final = 64
"""Agents of others. A holder that is started anew is another agent, so a long run meets ever more of them."""


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
        """The name of each agent by the metadata that led there, the one that was asked last at the end."""
        self._reading: Counter[str] = Counter()
        """Transfers under way, by the agent's name: it cannot be let go meanwhile."""

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
        handle, name = None, ""
        try:
            with self._guard:
                name = self._peer(place.reach)
                handle = self._begin(name, place, offset, target)
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
                self._release(handle, name)
        if state != "DONE":
            raise CarrierError(f"NIXL could not read {target.nbytes} bytes: it ended as {state}")

    def close(self) -> None:
        with self._guard:
            for known, _ in self._registered.values():
                self._forget(known)
            self._registered.clear()

    def _peer(self, reach: str) -> str:
        """The agent that `reach` leads to, which the library then knows; who was not asked for long is let go."""
        name = self._peers.pop(reach, None)
        if name is None:
            name = self._added(reach)
        self._peers[reach] = name
        for oldest in list(dict.fromkeys(self._peers.values()))[:-_REMEMBERED]:
            if not self._reading[oldest]:
                self._let_go(oldest)
        return name

    def _added(self, reach: str) -> str:
        """An agent's metadata change with what it registers: what it had before is let go, so that it does not add up."""
        metadata = base64.b64decode(reach)
        name: str = self._agent.add_remote_agent(metadata)
        if name in self._peers.values() and not self._reading[name]:
            self._let_go(name)
            self._agent.add_remote_agent(metadata)
        return name

    def _let_go(self, name: str) -> None:
        self._peers = {reach: other for reach, other in self._peers.items() if other != name}
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:  # noqa: BLE001 - the library's own kinds; it ends with the process
            _log.warning("NIXL does not let go of agent %s: %s: %s", name, type(error).__name__, error)

    def _begin(self, name: str, place: Place, offset: int, target: memoryview) -> Any:
        here = self._agent.get_xfer_descs([(address_of(target), target.nbytes, 0)], _MEMORY)
        there = self._agent.get_xfer_descs([(place.at(offset, target.nbytes), target.nbytes, 0)], _MEMORY)
        handle = self._agent.initialize_xfer("READ", here, there, name, b"")
        self._reading[name] += 1
        return handle

    def _release(self, handle: Any, name: str) -> None:
        """One that is under way still may refuse to be let go: that must not hide why it was given up; its agent stays."""
        try:
            with self._guard:
                self._agent.release_xfer_handle(handle)
                self._reading[name] -= 1
                if not self._reading[name]:
                    del self._reading[name]
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
