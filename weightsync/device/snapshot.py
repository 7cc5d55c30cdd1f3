"""A trainer's weights, copied once on its own device: training stands still for that copy only, which takes milliseconds.

    take: model -> flat buffer (device to device)      | the trainer stands still
    on_host: digests on the device, buffer -> file     | beside training, in a thread and a stream of its own

Costs the device as much memory as the weights have. Invariant: who holds a `DeviceSnapshot` holds the only buffer; the next
one is taken after `close`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import msgspec
import torch
import torch.multiprocessing
from torch import Tensor

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.device.multilinear import ROW_BYTES, digests
from physarum.weightsync.device.pinned import PinnedFiles
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import Form, lay_out
from physarum.weightsync.parallel import spread
from physarum.weightsync.snapshot import Snapshot

_PIECE_BYTES: Final = 64 << 20

Export = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives all tensors under their Hugging Face names, in the same order each time; they are read before the next one comes."""


class Place(msgspec.Struct, frozen=True):
    """A tensor in the buffer."""

    form: Form
    offset: int


class FlatBuffer:
    """The memory for one version on `device`. Tensors begin at multiples of 4096 bytes, and between them it is zero."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.places: dict[str, Place] = {}
        self.memory: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pinned: list[Tensor] = []
        self._files = PinnedFiles()

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
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pinned = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def _beside(self) -> AbstractContextManager[object]:
        """What is done in it does not wait for training, nor training for it."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @property
    def size_bytes(self) -> int:
        return self.memory.numel() if self.memory is not None else 0

    def layout(self) -> list[Any]:
        """For an agent: each tensor's name, dtype, shape, 0 (it is in no file), offset, bytes."""
        return [
            [name, place.form.dtype, list(place.form.shape), 0, place.offset, place.form.size_bytes]
            for name, place in self.places.items()
        ]

    def digests(self) -> dict[str, str]:
        """Of every tensor, computed where the buffer is."""
        assert self.memory is not None
        with self._beside():
            found = digests(self.memory, [(place.offset, place.form.size_bytes) for place in self.places.values()])
        return dict(zip(self.places, found, strict=True))

    def write(self, filling: Filling) -> int:
        """As a safetensors file; its size. Raises NoRoomError."""
        assert self.memory is not None
        layout = lay_out({name: place.form for name, place in self.places.items()}, "")
        targets = [(place.offset, place.form.size_bytes, layout.offsets[name]) for name, place in self.places.items()]
        if not self._write_directly(filling, targets, layout.size_bytes):
            self._write_in_pieces(filling, targets)
        filling.write(layout.header, 0)
        return layout.size_bytes

    def _write_directly(self, filling: Filling, targets: list[tuple[int, int, int]], size: int) -> bool:
        """From the device into the file's own memory, where that can be page-locked."""
        assert self.memory is not None
        if self._stream is None or filling.path is None:
            return False
        filling.reserve(size)
        file = self._files.memory(filling.descriptor)
        if file is None:
            return False
        with self._beside():
            for offset, count, target in targets:
                file[target : target + count].copy_(self.memory[offset : offset + count], non_blocking=True)
        self._stream.synchronize()
        return True

    def _write_in_pieces(self, filling: Filling, targets: list[tuple[int, int, int]]) -> None:
        assert self.memory is not None
        pending: tuple[int, memoryview, torch.cuda.Event | None] | None = None
        for number, start in enumerate(range(0, self.memory.numel(), _PIECE_BYTES)):
            arriving = self._to_host(number, start)
            if pending is not None:
                _land(filling, targets, pending)
            pending = (start, *arriving)
        if pending is not None:
            _land(filling, targets, pending)

    def _to_host(self, number: int, start: int) -> tuple[memoryview, torch.cuda.Event | None]:
        """A piece on its way into pinned memory."""
        assert self.memory is not None
        source = self.memory[start : start + _PIECE_BYTES]
        if self._stream is None:
            return source.numpy().data, None
        piece, done = self._pinned[number % 2][: source.numel()], torch.cuda.Event()
        with self._beside():
            piece.copy_(source, non_blocking=True)
            done.record()
        return piece.numpy().data, done


class DeviceSnapshot:
    """The weights of one version, on the device."""

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer

    def on_host(self, area: SharedArea | None, name: str) -> Snapshot:
        """The same version as a file of the area, with the digests that the device computed. Blocking; call it from a thread.

        Raises NoRoomError.
        """
        filling = area.begin(name) if area is not None else Filling.anonymous()
        try:
            found = self.buffer.digests()
            filling.finish(self.buffer.write(filling))
            return Snapshot(HeldFile(os.dup(filling.descriptor)), filling, self.buffer.chunk_bytes, found)
        except BaseException:
            filling.discard()
            raise


def _land(
    filling: Filling, targets: list[tuple[int, int, int]], piece: tuple[int, memoryview, torch.cuda.Event | None]
) -> None:
    """What of each tensor is in the piece goes to its place in the file."""
    start, data, arrived = piece
    if arrived is not None:
        arrived.synchronize()
    parts = []
    for offset, size, target in targets:
        first, last = max(offset, start), min(offset + size, start + data.nbytes)
        if first < last:
            parts.append((data[first - start : last - start], target + first - offset))
    spread(lambda part: filling.write(*part), parts)


def _form(tensor: Tensor) -> Form:
    return Form(by_name(str(tensor.dtype).removeprefix("torch.")).name, tuple(tensor.shape))
