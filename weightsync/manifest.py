"""What one version of the weights consists of. A manifest that contradicts itself refuses to exist (ManifestError).

Each tensor is the concatenation of its chunks, little-endian, row-major, in order. Chunks are named by content, so what
did not change between two versions has the same names in both and is sent once.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from physarum.bus.codec import decode, encode
from physarum.bus.version import Version
from physarum.weightsync.digest import digest_of, is_digest
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ManifestError


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """`size` bytes named by their content."""

    digest: str
    size: int


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor under its Hugging Face name. `dtype` as torch names it, without `torch.`. `device_digest`: of all its bytes, as
    devices compute it (device/multilinear.py), where the trainer's did; else empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    device_digest: str = ""

    def __post_init__(self) -> None:
        if any(not is_digest(chunk.digest) or chunk.size <= 0 for chunk in self.chunks):
            raise ManifestError(f"tensor {self.name} has a chunk that is no digest with a positive size: {self.chunks}")
        found = sum(chunk.size for chunk in self.chunks)
        if found != self.size_bytes:
            raise ManifestError(
                f"tensor {self.name} of shape {self.shape} in {self.dtype} is {self.size_bytes} bytes,"
                f" but its chunks hold {found}"
            )

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * by_name(self.dtype).size_bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `model_digest` names the architecture (the model's configuration), `step` the optimizer step,
    `created` the time of publication in Unix seconds; `parent` is the label of the version it was trained from."""

    version: Version
    parent: str | None
    model_digest: str
    tensors: tuple[TensorEntry, ...]
    encoding: Literal["raw"] = "raw"
    total_bytes: int
    step: int
    created: float
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        names = {tensor.name for tensor in self.tensors}
        if not names or len(names) != len(self.tensors):
            raise ManifestError(f"{self.version} names {len(names)} different tensors in {len(self.tensors)} entries")
        found = sum(tensor.size_bytes for tensor in self.tensors)
        if found != self.total_bytes:
            raise ManifestError(f"{self.version} says {self.total_bytes} bytes, but its tensors are {found}")

        sizes = self.sizes()
        for chunk in (chunk for tensor in self.tensors for chunk in tensor.chunks):
            if sizes[chunk.digest] != chunk.size:
                raise ManifestError(
                    f"{self.version}: chunk {chunk.digest} has two sizes, {sizes[chunk.digest]} and {chunk.size}"
                )

    @property
    def label(self) -> str:
        return str(self.version)

    def sizes(self) -> dict[str, int]:
        """Bytes of every distinct chunk by digest, in order of first use."""
        return {chunk.digest: chunk.size for tensor in self.tensors for chunk in tensor.chunks}


def encode_manifest(manifest: Manifest) -> bytes:
    return encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Raises CodecError when the bytes are no manifest, or one that contradicts itself."""
    return decode(data, Manifest)


def manifest_digest(manifest: Manifest) -> str:
    """The digest of the whole record, as messages refer to it."""
    return digest_of(encode(manifest))


def content_digest(manifest: Manifest) -> str:
    """The digest of the weights alone: equal for two publications of the same bytes at different times."""
    return digest_of(encode(msgspec.structs.replace(manifest, parent=None, step=0, created=0.0, metrics={})))
