"""MessagePack on the wire: arrays travel as raw little-endian bytes, masks as runs or bits, never as lists, never pickled.

Decoding validates at the edge: what `decode` returns has the type that was asked for, or CodecError is raised.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np
import numpy.typing as npt

from physarum.bus.errors import CodecError, RecordError

ARRAY_EXT: Final = 1
MASK_EXT: Final = 2

# Only fixed-width numeric types may travel; the list is the contract between versions of physarum.
_DTYPES: Final = ("<i4", "<i8", "<f4", "<f8", "<f2", "|u1", "<u2", "<u4", "<i2", "|i1", "<u8")
_DTYPE_CODE: Final = {name: code for code, name in enumerate(_DTYPES)}
_RUNS, _BITS = 0, 1
# Runs name their lengths, so a few altered bytes could ask for gigabytes; no sequence is near this long.
_MASK_LIMIT: Final = 1 << 26

T = TypeVar("T")


def _pack_array(array: npt.NDArray[Any]) -> tuple[int, bytes]:
    little = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    code = _DTYPE_CODE.get(little.dtype.str)
    if code is None:
        raise CodecError(
            f"array of dtype {array.dtype} cannot travel; expected one of {', '.join(_DTYPES)} or a bool vector"
        )
    head = struct.pack(f"<BB{little.ndim}I", code, little.ndim, *little.shape)
    return ARRAY_EXT, head + little.tobytes()


def _unpack_array(data: bytes | memoryview) -> npt.NDArray[Any]:
    code, ndim = struct.unpack_from("<BB", data)
    if code >= len(_DTYPES):
        raise CodecError(f"array has dtype code {code}; this version knows 0..{len(_DTYPES) - 1}")
    shape = struct.unpack_from(f"<{ndim}I", data, 2)
    array = np.frombuffer(data, dtype=_DTYPES[code], offset=2 + 4 * ndim)
    if array.size != math.prod(shape):
        raise CodecError(f"array of shape {shape} holds {array.size} elements: the message is truncated or altered")
    return array.reshape(shape)


def _pack_mask(mask: npt.NDArray[np.bool_]) -> tuple[int, bytes]:
    """Bool vectors as run lengths or as bits, whichever is smaller (multi-turn masks have few runs)."""
    if mask.size > _MASK_LIMIT:
        raise CodecError(f"mask of {mask.size} entries cannot travel; expected at most {_MASK_LIMIT}")
    flat = mask.ravel()
    edges = np.flatnonzero(np.diff(flat.view(np.uint8), prepend=0, append=0))
    runs = np.diff(edges, prepend=0, append=flat.size).astype("<u4") if flat.size else np.zeros(0, "<u4")
    bits = np.packbits(flat, bitorder="little")
    kind, payload = (_RUNS, runs.tobytes()) if runs.nbytes < bits.nbytes else (_BITS, bits.tobytes())
    return MASK_EXT, struct.pack("<BI", kind, flat.size) + payload


def _unpack_mask(data: bytes | memoryview) -> npt.NDArray[np.bool_]:
    kind, size = struct.unpack_from("<BI", data)
    if kind not in (_RUNS, _BITS) or size > _MASK_LIMIT:
        raise CodecError(
            f"mask of kind {kind} with {size} entries; expected kind 0 or 1 and at most {_MASK_LIMIT} entries"
        )
    if kind == _BITS:
        bits = np.frombuffer(data, np.uint8, offset=5)
        if bits.size != (size + 7) // 8:
            raise CodecError(f"mask of {size} bits holds {bits.size} bytes: the message is truncated or altered")
        return np.unpackbits(bits, count=size, bitorder="little").astype(bool)
    runs = np.frombuffer(data, "<u4", offset=5)
    if int(runs.sum(dtype=np.int64)) != size:
        raise CodecError(
            f"mask runs add up to {int(runs.sum(dtype=np.int64))}, expected {size}: the message is altered"
        )
    return np.repeat(np.arange(runs.size) % 2 == 1, runs)


def _extension(array: npt.NDArray[Any]) -> tuple[int, bytes]:
    return _pack_mask(array) if array.dtype == np.bool_ and array.ndim == 1 else _pack_array(array)


def _ext_hook(code: int, data: bytes | memoryview) -> npt.NDArray[Any]:
    try:
        if code == ARRAY_EXT:
            return _unpack_array(data)
        if code == MASK_EXT:
            return _unpack_mask(data)
    except (struct.error, ValueError) as error:
        raise CodecError(f"an array of {len(data)} bytes cannot be read: {error}") from error
    raise CodecError(f"unknown extension type {code}; this version knows {ARRAY_EXT} (array) and {MASK_EXT} (mask)")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise CodecError(f"{type(value).__name__} cannot travel; convert it to numbers, text, lists, maps or arrays")


def _for_msgpack(value: Any) -> Any:
    return msgpack.ExtType(*_extension(value)) if isinstance(value, np.ndarray) else _plain(value)


def _for_msgspec(value: Any) -> Any:
    return msgspec.msgpack.Ext(*_extension(value)) if isinstance(value, np.ndarray) else _plain(value)


def _typed(expected: type, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    raise CodecError(f"found {type(value).__name__} where an array was expected")


def pack(value: Any) -> bytes:
    """Builtins and arrays, without a schema, to MessagePack."""
    return _packed(lambda: bytes(msgpack.packb(value, default=_for_msgpack, use_bin_type=True)))


def unpack(data: bytes) -> Any:
    """MessagePack to builtins and (read-only) arrays. Raises CodecError on anything else."""
    try:
        return msgpack.unpackb(data, ext_hook=_ext_hook, raw=False, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"{len(data)} bytes are not MessagePack: {error}") from error


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_for_msgspec)


@functools.cache
def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_ext_hook, dec_hook=_typed)


def encode(record: msgspec.Struct) -> bytes:
    """A typed record to its wire form (the same MessagePack as `pack` gives; msgspec is the faster writer)."""
    return _packed(lambda: _encoder.encode(record))


def decode(data: bytes, kind: type[T]) -> T:
    """Wire form to a validated record of type `kind`. Raises CodecError naming the field that is wrong."""
    try:
        record: T = _decoder(kind).decode(data)  # type: ignore[arg-type]  # a type is hashable
    except (msgspec.DecodeError, RecordError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))  # a union of records has no name of its own
        raise CodecError(f"not a valid {name}: {error}") from error
    return record


def _packed(write: Callable[[], bytes]) -> bytes:
    """Whatever a writer refuses (an integer above 64 bits, a type that it does not know) is a CodecError."""
    try:
        return write()
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise CodecError(f"cannot travel: {error}") from error
