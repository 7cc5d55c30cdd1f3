"""One version from a trainer's device to those of many engines at once, by a collective between agents.

    sender: store --layout--> wait until all are ready --broadcast piece by piece--> done
    receiver: join --> ready --> the same broadcasts --> done

The group joins agents, never an engine: one that dies or stays away costs its agents a deadline, and no engine ever holds a
half of a version. Every wait has a deadline; after any failure the process is thrown away by its owner, and the group with
it. Stands alone: torch only.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

_PIECE_BYTES = 1 << 30
"""Of one broadcast: large enough for the wire's full rate, and a bound to what NCCL registers at once."""


class Group:
    """This agent's place in the newest group. The sender is rank 0 and keeps the store through which all meet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: TCPStore | None = None
        self._name = ""

    def open(self, host: str) -> int:
        """The sender's store; its port."""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def send(
        self, buffer: Tensor, name: str, label: str, layout: list[Any], size: int, members: int, timeout_s: float
    ) -> dict[str, Any]:
        """To all members, or a failure. `layout` is what receivers answer to their owners."""
        assert self._store is not None, "open comes first"
        store = PrefixStore(f"{name}/{label}", self._store)
        store.set("layout", json.dumps({"layout": layout, "size": size}))
        limit = datetime.timedelta(seconds=timeout_s)
        store.wait([f"ready/{rank}" for rank in range(1, members + 1)], limit)
        self._join(name, 0, members + 1, limit)
        return {"seconds": self._broadcast(buffer[:size]), "bytes": size}

    def receive(
        self,
        room: Callable[[int], Tensor],
        host: str,
        port: int,
        name: str,
        label: str,
        rank: int,
        members: int,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Into `room`; the layout that the sender gave."""
        limit = datetime.timedelta(seconds=timeout_s)
        if name != self._name:
            self._store = TCPStore(host, port, is_master=False, timeout=limit)
        assert self._store is not None
        store = PrefixStore(f"{name}/{label}", self._store)
        store.wait(["layout"], limit)
        told = json.loads(store.get("layout"))
        buffer = room(told["size"])
        store.set(f"ready/{rank}", "")
        self._join(name, rank, members + 1, limit)
        return {"seconds": self._broadcast(buffer), "layout": told["layout"]}

    def _join(self, name: str, rank: int, world: int, limit: datetime.timedelta) -> None:
        """Collective; nothing where this is the group already."""
        if name == self._name:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        assert self._store is not None
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        store = PrefixStore(name, self._store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=device)
        self._name = name

    def _broadcast(self, buffer: Tensor) -> float:
        """Seconds. All pieces are under way at once, in order."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        pieces = [
            dist.broadcast(buffer[start : start + _PIECE_BYTES], src=0, async_op=True)
            for start in range(0, buffer.numel(), _PIECE_BYTES)
        ]
        for piece in pieces:
            piece.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started
