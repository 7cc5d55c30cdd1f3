"""A trainer's weights, copied once on its own device: training stands still for that copy only, which takes milliseconds.

    take: model -> flat buffer (device to device)      | the trainer stands still
    on_host: buffer -> file, with digests (to_host.py) | beside training, in threads and streams of their own

Costs the device as much memory as the weights have. Invariant: who holds a `DeviceSnapshot` holds the only buffer; the next
one is taken after `close`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.device.multilinear import ROW_BYTES
from physarum.weightsync.device.to_host import Place, ToHost
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import Form
from physarum.weightsync.snapshot import Snapshot

Export = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives all tensors under their Hugging Face names, in the same order each time; they are read before the next one comes."""


class FlatBuffer:
    """The memory for one version on `device`. Tensors begin at multiples of 4096 bytes, and between them it is zero."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.places: dict[str, Place] = {}
        self.memory: Tensor | None = None
        self.out: ToHost | None = None

    def take(self, export: Export) -> DeviceSnapshot:
        """Copies every tensor; returns when that is done. Raises torch.OutOfMemoryError, ManifestError."""
        if self.memory is None:
            self._make_room(export)
        assert self.memory is not None
        seen = 0
        for name, tensor in export():
            place = self.places.get(name)
            if place is None or place.form != _form(tensor):
                raise ManifestError(f"tensor {name} is {_form(tensor)}, expected {place}: the model changed its shape")
            if place.form.size_bytes:
                self._view(place).copy_(tensor.detach().reshape(-1).view(torch.uint8))
            seen += 1
        if seen != len(self.places):
            raise ManifestError(f"{seen} tensors were exported, expected {len(self.places)}")
        if self.memory.is_cuda:
            torch.cuda.current_stream().synchronize()
        return DeviceSnapshot(self)

    def _view(self, place: Place) -> Tensor:
        assert self.memory is not None
        return self.memory[place.offset : place.offset + place.form.size_bytes]

    def _make_room(self, export: Export) -> None:
        """An export that only looks: nothing is held twice."""
        places: dict[str, Place] = {}
        end, device = 0, torch.device("cpu")
        for name, tensor in export():
            if name in places:
                raise ManifestError(f"tensor {name} is exported twice")
            places[name] = Place(_form(tensor), end)
            end += -(-places[name].form.size_bytes // ROW_BYTES) * ROW_BYTES
            device = tensor.device
        self.memory = torch.zeros(max(end, ROW_BYTES), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")  # what an agent is given is a name
            self.memory.share_memory_()
        self.places = places
        self.out = ToHost(self.memory, places, self.chunk_bytes)

    @property
    def size_bytes(self) -> int:
        return self.memory.numel() if self.memory is not None else 0

    def layout(self) -> list[Any]:
        """For an agent: each tensor's name, dtype, shape, 0 (it is in no file), offset, bytes."""
        return [
            [name, place.form.dtype, list(place.form.shape), 0, place.offset, place.form.size_bytes]
            for name, place in self.places.items()
        ]


class DeviceSnapshot:
    """The weights of one version, on the device."""

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer

    def on_host(self, area: SharedArea | None, name: str) -> Snapshot:
        """The same version as a file of the area, hashed on both sides. Blocking; call it from a thread.

        Raises NoRoomError.
        """
        filling = area.begin(name) if area is not None else Filling.anonymous()
        try:
            assert self.buffer.out is not None
            copied = self.buffer.out.copy(filling)
            filling.finish(copied.size_bytes)
            file = HeldFile(os.dup(filling.descriptor))
            return Snapshot(file, filling, self.buffer.chunk_bytes, copied.digests, copied.chunks)
        except BaseException:
            filling.discard()
            raise


def _form(tensor: Tensor) -> Form:
    return Form(by_name(str(tensor.dtype).removeprefix("torch.")).name, tuple(tensor.shape))
