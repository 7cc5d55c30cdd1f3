"""`nccl`: versions come straight from the trainer's device to the engine's (gloo where there is no CUDA), and are handed over
as by `ipc`.

The engine takes no part in the broadcast: its agent does. What arrived is hashed on the device while its manifest is still on
its way, and compared with it before it counts; what did not arrive in time is brought and staged as by `ipc`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from physarum.weightsync.broadcast import Round
from physarum.weightsync.device.checks import verifiable
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.errors import DeviceError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import in_thread
from physarum.weightsync.target import PauseMode, WeightTarget
from physarum.weightsync.transports.ipc import IpcTransport

_log = logging.getLogger(__name__)

_GRACE_S: Final = 5.0
"""Beyond the collective's own deadline, for its error to arrive."""


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the agent's buffer, as the sender laid it out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: int
    offset: int
    size: int


class _Arrived(NamedTuple):
    """A version in the agent's buffer: its tensors, and the digest of each as it lies there."""

    layout: dict[str, _Tensor]
    digests: dict[str, str]


class NcclTransport:
    """One engine's; `me` is its name in rounds."""

    name: str

    def __init__(self, target: WeightTarget, agent: DeviceAgent, ranks: int, timeout_s: float, me: str) -> None:
        self.name = "nccl"
        self.altered = 0
        self.agent = agent
        self._me = me
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._ipc = IpcTransport(target, agent, ranks, timeout_s)
        self._receiving: tuple[str, asyncio.Task[_Arrived | None]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._layout: dict[str, _Tensor] | None = None
        self._group = ""
        self._receives_of = ""
        """The group of the round under way."""
        self._buffer = asyncio.Lock()
        """Held while something arrives in the agent's memory, and from `arrived` to `clear`."""
        self._mine = False

    def join(self, one: Round) -> None:
        """Takes part in a round that names this engine: called as soon as it is seen, and only once for each."""
        if self._me not in one.members or one.until <= time.time():
            return
        if self._receives_of not in ("", one.name):
            self._keep(asyncio.create_task(in_thread(self.agent.close)))  # that group is no more: its round never ends
        if one.gathers:
            self._keep(asyncio.create_task(self._gather(one), name=f"gather {one.name}"))
            return
        task = asyncio.create_task(self._receive(one), name=f"receive {one.label}")
        self._keep(task)
        self._receiving = (one.label, task)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        """The loop itself holds no task."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def arrived(self, manifest: Manifest) -> bool:
        """Whether this version was broadcast to the agent, complete and as the manifest says; waits for a round under way."""
        receiving, self._receiving = self._receiving, None
        self._layout, self.name = None, "ipc"
        found = await receiving[1] if receiving is not None and receiving[0] == manifest.label else None
        self._mine = await self._buffer.acquire()  # what else has arrived is overwritten, and was given up above
        if found is None or not self._matches(found, manifest):
            return False
        self._layout, self.name = found.layout, "nccl"
        return True

    def verifies(self, manifest: Manifest) -> bool:
        return self._ipc.verifies(manifest)

    async def prepare(self, file: HeldFile | None, manifest: Manifest, changed: Sequence[TensorEntry]) -> None:
        if self._layout is None:
            assert file is not None, "what did not arrive is in a file"
            await self._ipc.prepare(file, manifest, changed)
            return
        places = [msgspec.to_builtins(self._layout[one.name]) for one in changed]
        await self._ipc.hand_over(places)

    async def load(self, label: str, mode: PauseMode) -> None:
        await self._ipc.load(label, mode)

    async def clear(self) -> None:
        await self._ipc.clear()
        if self._mine:
            self._mine = False
            self._buffer.release()

    async def close(self) -> None:
        self._receiving = None
        for task in self._tasks:
            task.cancel()
        await self._ipc.close()

    async def _gather(self, one: Round) -> None:
        """The process for the group is there before its first version is."""
        async with self._buffer:
            try:
                await self._join_group(one.name)
                await in_thread(self.agent.call, "hello", self._timeout_s)
            except DeviceError as error:
                _log.warning("no device agent for broadcasts, versions are fetched: %s", error)

    async def _join_group(self, name: str) -> None:
        """A group is joined by a process that was in no other: nothing of an old one can hold it up."""
        if self._group not in ("", name):
            await in_thread(self.agent.close)
        self._group = name

    async def _receive(self, one: Round) -> _Arrived | None:
        async with self._buffer:
            return await self._received(one)

    async def _received(self, one: Round) -> _Arrived | None:
        limit_s = one.until - time.time()
        if limit_s <= 0:
            return None
        await self._join_group(one.name)
        arguments: dict[str, Any] = {
            "host": one.host,
            "port": one.port,
            "name": one.name,
            "label": one.label,
            "rank": one.members.index(self._me) + 1,
            "members": len(one.members),
            "timeout_s": limit_s,
        }
        self._receives_of = one.name
        try:
            answer = await in_thread(self.agent.call, "receive", limit_s + _GRACE_S, arguments=arguments)
            layout = msgspec.convert(answer["layout"], list[_Tensor])
            pieces = [(tensor.offset, tensor.size) for tensor in layout]
            found = (await in_thread(self.agent.call, "digests", self._timeout_s, pieces=pieces))["digests"]
        except DeviceError as error:
            _log.warning("%s was not received by broadcast, it is fetched: %s", one.label, error)
            return None
        finally:
            self._receives_of = ""
        names = [tensor.name for tensor in layout]
        return _Arrived(dict(zip(names, layout, strict=True)), dict(zip(names, found, strict=True)))

    def _matches(self, found: _Arrived, manifest: Manifest) -> bool:
        if not verifiable(manifest.tensors):
            return False  # it was hashed on the host, in a way that a device cannot check
        for tensor in manifest.tensors:
            place = found.layout.get(tensor.name)
            if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
                _log.warning("%s was broadcast without tensor %s as its manifest has it", manifest.label, tensor.name)
                return False
        wrong = [one.name for one in manifest.tensors if found.digests[one.name] != one.device_digest]
        if wrong:
            self.altered += len(wrong)
            _log.error("%s: %s arrived altered by broadcast; it is fetched", manifest.label, ", ".join(wrong[:3]))
        return not wrong
