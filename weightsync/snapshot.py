"""A trainer's weights, copied once: into a file of the area that will be the version, or into anonymous memory.

Invariant: `Snapshot.take` is the only part during which the trainer must hold still; what it returns shares no memory with
the model. Hashing, publication and everything after it read the copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from physarum.weightsync.area import Filling, SharedArea
from physarum.weightsync.chunk_hashing import ALGORITHM, Chunks, by_tensor
from physarum.weightsync.digest import Algorithm, digest_of
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.layout import Form, lay_out
from physarum.weightsync.manifest import Chunk, TensorEntry
from physarum.weightsync.parallel import spread

if TYPE_CHECKING:
    import torch

DEFAULT_CHUNK_BYTES: Final = 4 << 20
_HEADER_ROOM: Final = 1 << 20
"""Nobody knows the header before the last tensor. This is enough for 8,000 tensors; more move the data once."""
_PIECE_BYTES: Final = 64 << 20
_PART_BYTES: Final = 16 << 20
"""Of one tensor, copied at a time by one thread."""


class Snapshot:
    """All tensors of one version under their Hugging Face names, in `file`, which is what `filling` wrote."""

    def __init__(
        self,
        file: HeldFile,
        filling: Filling,
        chunk_bytes: int,
        device_digests: Mapping[str, str] | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        """`device_digests`: by tensor, where a device computed them; `chunks`: where they were hashed on the way here."""
        self.device_digests = device_digests or {}
        self._chunks = chunks
        self.file = file
        self.filling = filling
        self.chunk_bytes = chunk_bytes
        self.total_bytes = sum(form.size_bytes for form in file.forms.values())

    @classmethod
    def take(
        cls,
        named: Iterable[tuple[str, torch.Tensor]],
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        area: SharedArea | None = None,
        name: str = "snapshot",
    ) -> Snapshot:
        """Copies every tensor; blocks until that is done. Raises ManifestError for a strange dtype, NoRoomError."""
        filling = area.begin(name) if area is not None else Filling.anonymous()
        try:
            filling.finish(_write(filling, named))
            return cls(HeldFile(os.dup(filling.descriptor)), filling, chunk_bytes)
        except BaseException:
            filling.discard()
            raise

    def close(self) -> None:
        """Nobody reads it here any more; what was not published is discarded."""
        self.file.close()
        self.filling.discard()

    def entries(self, algorithm: Algorithm = "xxh3") -> tuple[tuple[TensorEntry, ...], dict[str, memoryview]]:
        """The manifest's tensors, and the bytes of every distinct chunk. Hashes everything that was not: call it from a
        thread."""
        chunks = self._chunks if self._chunks is not None and algorithm == ALGORITHM else self._hashed(algorithm)
        entries = tuple(
            TensorEntry(name, form.dtype, form.shape, chunks[name], self.device_digests.get(name, ""))
            for name, form in self.file.forms.items()
        )
        return entries, {digest: data for entry in entries for digest, data in self.file.chunks(entry)}

    def _hashed(self, algorithm: Algorithm) -> Chunks:
        pieces = [
            (name, piece) for name in self.file.forms for piece in _pieces(self.file.tensor(name), self.chunk_bytes)
        ]
        digests = spread(lambda one: digest_of(one[1], algorithm), pieces)
        found = ((name, Chunk(digest, piece.nbytes)) for (name, piece), digest in zip(pieces, digests, strict=True))
        return by_tensor(self.file.forms, found)


def _pieces(data: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, size):
        yield data[start : start + size]


def write_tensor(filling: Filling, name: str, tensor: torch.Tensor, offset: int) -> Form:
    """Copies it to its place; whoever exports may use its memory again then. Raises ManifestError, NoRoomError."""
    data, form = _host_bytes(name, tensor)
    parts = [(offset + start, data[start : start + _PART_BYTES]) for start in range(0, data.nbytes, _PART_BYTES)]
    spread(lambda part: filling.write(part[1], part[0]), parts)
    return form


def form_of(name: str, tensor: torch.Tensor) -> Form:
    """Raises ManifestError for a type that cannot be published."""
    try:
        return Form(by_name(str(tensor.dtype).removeprefix("torch.")).name, tuple(tensor.shape))
    except ManifestError as error:
        raise ManifestError(f"tensor {name}: {error}") from error


def _write(filling: Filling, named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """The size of the file."""
    forms: dict[str, Form] = {}
    end = start = len(lay_out({}, "", _HEADER_ROOM).header)
    for name, tensor in named:
        if name in forms:
            raise ManifestError(f"tensor {name} is exported twice")
        forms[name] = write_tensor(filling, name, tensor, end)
        end += forms[name].size_bytes
    layout = lay_out(forms, "", _HEADER_ROOM)
    if len(layout.header) > start:
        _move(filling, start, len(layout.header), end - start)
    filling.write(layout.header, 0)
    return layout.size_bytes


def _move(filling: Filling, start: int, target: int, count: int) -> None:
    """The data towards the end, from behind: the two places overlap."""
    for at in range((count - 1) // _PIECE_BYTES * _PIECE_BYTES if count else -1, -1, -_PIECE_BYTES):
        filling.write(os.pread(filling.descriptor, min(_PIECE_BYTES, count - at), start + at), target + at)


def _host_bytes(name: str, tensor: torch.Tensor) -> tuple[memoryview, Form]:
    import torch

    form = form_of(name, tensor)
    host = tensor.detach().to("cpu").contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")
    if data.nbytes != form.size_bytes:
        raise ManifestError(f"tensor {name} is {data.nbytes} bytes on the host, expected {form.size_bytes}")
    return data, form
