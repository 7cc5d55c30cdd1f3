"""A chunk as what changed since another one: a way to send it, not a thing with a name of its own.

    b"S" count, bytes, zstd(gaps between changed elements), zstd(new XOR old of those)    few elements changed
    b"X" zstd(new XOR old of all)                                                          many changed a little

Gaps are uint32; numbers are little-endian and stand in planes: first bytes of all of them, then all second ones, so that what
changed alike stands together. The smaller one that was measured is sent; nothing where the chunk itself is smaller. The
receiver builds the chunk beside its old one and takes it for good only if its digest is the manifest's, so a difference needs
no digest, no number and no chain: its base is named by content, and whoever lacks the base, or gets anything else than the
chunk, takes the chunk itself.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import zstandard

from physarum.weightsync.errors import ChunkAlteredError

_SPARSE: Final = b"S"
_PLANES: Final = b"X"
_FEW: Final = 0.02
"""Share of changed elements up to which only positions are tried, and """
_MANY: Final = 0.25
"""that above which they are not: then their gaps take more than the zeros between them."""
_WORTH: Final = 0.9
"""Of the chunk's size: a difference that saves less is not worth its computation."""
_LEVEL: Final = 1
_COUNT_BYTES: Final = 4
HEADER: Final = "X-Physarum-Difference"
"""Of an answer that is a difference to the chunk that it names."""
WIDTHS: Final = (1, 2, 4, 8)
"""Bytes of an element."""

Array = np.ndarray[Any, np.dtype[Any]]


def encode_difference(new: memoryview, base: memoryview, width: int) -> bytes | None:
    """`new` as a difference to `base`, elements of `width` bytes; None where it saves nothing or they do not compare."""
    if width not in WIDTHS or new.nbytes != base.nbytes or new.nbytes % width:
        return None
    after, before = (np.frombuffer(data, f"<u{width}") for data in (new, base))
    changed = after ^ before
    where = np.flatnonzero(changed)
    found = []
    if where.size <= _MANY * after.size:
        found.append(_sparse(changed, where))
    if where.size > _FEW * after.size:
        found.append(_PLANES + _compressed(_split(changed)))
    best = min(found, key=len)
    return best if len(best) < _WORTH * new.nbytes else None


def apply_difference(data: bytes, base: memoryview, width: int, target: memoryview) -> None:
    """Fills `target`, as long as `base`, which may not overlap it. What it holds must still be verified.

    Raises ChunkAlteredError for bytes that are no difference to such a chunk (`target` holds rubbish then).
    """
    kind, body = data[:1], data[1:]
    try:
        if kind == _SPARSE:
            _apply_sparse(body, base, width, target)
        elif kind == _PLANES:
            _apply_planes(body, base, width, target)
        else:
            raise ChunkAlteredError(f"a difference of kind {kind!r} is unknown; expected {_SPARSE!r} or {_PLANES!r}")
    except (zstandard.ZstdError, ValueError, IndexError) as error:
        raise ChunkAlteredError(f"{len(data)} bytes are no difference to a chunk of {base.nbytes}: {error}") from error


def _sparse(changed: Array, where: Array) -> bytes:
    gaps = _compressed(_split(np.diff(where, prepend=0).astype("<u4")))
    numbers = (where.size.to_bytes(_COUNT_BYTES, "little"), len(gaps).to_bytes(_COUNT_BYTES, "little"))
    return b"".join((_SPARSE, *numbers, gaps, _compressed(_split(changed[where]))))


def _apply_sparse(body: bytes, base: memoryview, width: int, target: memoryview) -> None:
    count, packed = (int.from_bytes(body[at : at + _COUNT_BYTES], "little") for at in (0, _COUNT_BYTES))
    elements = np.frombuffer(target, f"<u{width}")
    if count > elements.size:
        raise ValueError(f"{count} changed elements of {elements.size}")
    start = 2 * _COUNT_BYTES
    gaps = _joined(_expanded(body[start : start + packed], 4 * count), 4)
    changed = _joined(_expanded(body[start + packed :], width * count), width)
    where = np.cumsum(gaps, dtype=np.int64)
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(base, np.uint8))
    elements[where] ^= changed  # IndexError beyond the end; gaps are not negative


def _apply_planes(body: bytes, base: memoryview, width: int, target: memoryview) -> None:
    changed = _joined(_expanded(body, base.nbytes), width)
    np.bitwise_xor(np.frombuffer(base, f"<u{width}"), changed, out=np.frombuffer(target, f"<u{width}"))


def _split(elements: Array) -> bytes:
    """First bytes of all elements, then all second ones, ..."""
    planes = elements.view(np.uint8).reshape(elements.size, elements.itemsize)
    return b"".join(np.ascontiguousarray(planes[:, place]).data for place in range(elements.itemsize))


def _joined(planes: bytes, width: int) -> Array:
    elements = np.empty((len(planes) // width, width), np.uint8)
    for place, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(width, -1)):
        elements[:, place] = plane
    return elements.view(f"<u{width}").reshape(-1)


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(data)


def _expanded(data: bytes, size: int) -> bytes:
    """Raises ValueError unless it is exactly `size` bytes; never makes more."""
    found = zstandard.get_frame_parameters(data).content_size if data else -1
    if found != size:
        raise ValueError(f"a frame of {found} bytes, expected {size}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=max(size, 1))
