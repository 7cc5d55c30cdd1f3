"""A version from the device into a file of the host, beside training, hashed on both sides while it travels.

    copies, in order of the file   |------------------------|
    chunks, on the host             |------------------------|      each as it arrives
    tensors, on the device                     |---------|          from half of the way on

The device has its first half of the time for the broadcast of the same version, whose kernels would wait for those of the
digests: two processes take turns on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from physarum.weightsync.area import Filling
from physarum.weightsync.chunk_hashing import ChunkHashing, Chunks
from physarum.weightsync.device.multilinear import digests
from physarum.weightsync.device.pinned import PinnedFiles
from physarum.weightsync.layout import Form, lay_out
from physarum.weightsync.parallel import spread

_PIECE_BYTES: Final = 64 << 20
_GROUP_BYTES: Final = 256 << 20
"""Copied before the host looks at what has arrived."""


class Place(msgspec.Struct, frozen=True):
    """A tensor in the device's buffer."""

    form: Form
    offset: int


class Copied(NamedTuple):
    """What the file then holds: its bytes, its chunks, and each tensor's digest as the device computed it."""

    size_bytes: int
    chunks: Chunks
    digests: dict[str, str]


class _Move(NamedTuple):
    """`size` bytes from the buffer's `offset` to the file's `target`."""

    offset: int
    size: int
    target: int


class ToHost:
    """The way out of one buffer. Costs a stream or two and, where files cannot be page-locked, some pinned memory."""

    def __init__(self, memory: Tensor, places: Mapping[str, Place], chunk_bytes: int) -> None:
        self._memory = memory
        self._places = places
        self._chunk_bytes = chunk_bytes
        self._files = PinnedFiles()
        cuda = memory.is_cuda
        self._copying = torch.cuda.Stream(memory.device) if cuda else None
        self._digesting = torch.cuda.Stream(memory.device) if cuda else None
        self._pinned = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)] if cuda else []

    def copy(self, filling: Filling) -> Copied:
        """As a safetensors file. Blocking. Raises NoRoomError."""
        forms = {name: place.form for name, place in self._places.items()}
        layout = lay_out(forms, "")
        moves = [_Move(one.offset, one.form.size_bytes, layout.offsets[name]) for name, one in self._places.items()]
        file = self._page_locked(filling, layout.size_bytes)
        with ChunkHashing(filling.descriptor, forms, layout, self._chunk_bytes) as hashing:
            if file is not None:
                found = self._directly(file, moves, hashing.reached)
            else:
                self._in_pieces(filling, moves, hashing.reached)
                found = self._digests()
            filling.write(layout.header, 0)
            return Copied(layout.size_bytes, hashing.chunks(), found)

    def _page_locked(self, filling: Filling, size_bytes: int) -> Tensor | None:
        if self._copying is None or filling.path is None:
            return None
        filling.reserve(size_bytes)
        return self._files.memory(filling.descriptor)

    def _directly(self, file: Tensor, moves: list[_Move], reached: Callable[[int], None]) -> dict[str, str]:
        """Into the file's own memory; the digests."""
        arrivals = self._queued(file, moves)
        with ThreadPoolExecutor(1, thread_name_prefix="digests") as beside:
            found = beside.submit(self._digests, arrivals[len(arrivals) // 2][1] if arrivals else None)
            for end, arrived in arrivals:
                arrived.synchronize()
                reached(end)
            return found.result()

    def _queued(self, file: Tensor, moves: list[_Move]) -> list[tuple[int, torch.cuda.Event]]:
        """Everything is on its way: (place in the file, when it has arrived up to there)."""
        arrivals: list[tuple[int, torch.cuda.Event]] = []
        waiting = 0
        parts = [part for move in moves for part in _split(move)]
        with _in(self._copying):
            for number, (offset, size, target) in enumerate(parts):
                file[target : target + size].copy_(self._memory[offset : offset + size], non_blocking=True)
                waiting += size
                if waiting >= _GROUP_BYTES or number == len(parts) - 1:
                    arrived, waiting = torch.cuda.Event(blocking=True), 0
                    arrived.record()
                    arrivals.append((target + size, arrived))
        return arrivals

    def _digests(self, after: torch.cuda.Event | None = None) -> dict[str, str]:
        """Of every tensor, computed where the buffer is."""
        if self._digesting is not None and after is not None:
            self._digesting.wait_event(after)
        with _in(self._digesting):
            found = digests(self._memory, [(one.offset, one.form.size_bytes) for one in self._places.values()])
        return dict(zip(self._places, found, strict=True))

    def _in_pieces(self, filling: Filling, moves: list[_Move], reached: Callable[[int], None]) -> None:
        """Through two pieces of pinned memory: one is written while the other arrives."""
        pending: tuple[int, memoryview, torch.cuda.Event | None] | None = None
        for number, start in enumerate(range(0, self._memory.numel(), _PIECE_BYTES)):
            arriving = self._to_pinned(number, start)
            if pending is not None:
                _land(filling, moves, pending, reached)
            pending = (start, *arriving)
        if pending is not None:
            _land(filling, moves, pending, reached)

    def _to_pinned(self, number: int, start: int) -> tuple[memoryview, torch.cuda.Event | None]:
        """A piece on its way into pinned memory."""
        source = self._memory[start : start + _PIECE_BYTES]
        if self._copying is None:
            return source.numpy().data, None
        piece, done = self._pinned[number % 2][: source.numel()], torch.cuda.Event()
        with _in(self._copying):
            piece.copy_(source, non_blocking=True)
            done.record()
        return piece.numpy().data, done


def _in(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is done in it does not wait for training, nor training for it."""
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _split(move: _Move) -> list[_Move]:
    return [
        _Move(move.offset + start, min(_GROUP_BYTES, move.size - start), move.target + start)
        for start in range(0, move.size, _GROUP_BYTES)
    ]


def _land(
    filling: Filling,
    moves: list[_Move],
    piece: tuple[int, memoryview, torch.cuda.Event | None],
    reached: Callable[[int], None],
) -> None:
    """What of each tensor is in the piece goes to its place in the file."""
    start, data, arrived = piece
    if arrived is not None:
        arrived.synchronize()
    parts = []
    for offset, size, target in moves:
        first, last = max(offset, start), min(offset + size, start + data.nbytes)
        if first < last:
            parts.append((data[first - start : last - start], target + first - offset))
    spread(lambda part: filling.write(*part), parts)
    if parts:
        reached(parts[-1][1] + parts[-1][0].nbytes)
