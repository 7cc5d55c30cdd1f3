"""Element types that weights may have: torch's name, safetensors' code and bytes per element, in one table."""

from __future__ import annotations

from typing import Final

import msgspec

from physarum.weightsync.errors import ManifestError


class Dtype(msgspec.Struct, frozen=True):
    """One element type."""

    name: str
    code: str
    size_bytes: int


_ALL: Final = (
    Dtype("float64", "F64", 8),
    Dtype("float32", "F32", 4),
    Dtype("float16", "F16", 2),
    Dtype("bfloat16", "BF16", 2),
    Dtype("float8_e4m3fn", "F8_E4M3", 1),
    Dtype("float8_e5m2", "F8_E5M2", 1),
    Dtype("float8_e8m0fnu", "F8_E8M0", 1),
    Dtype("int64", "I64", 8),
    Dtype("int32", "I32", 4),
    Dtype("int16", "I16", 2),
    Dtype("int8", "I8", 1),
    Dtype("uint8", "U8", 1),
    Dtype("bool", "BOOL", 1),
)
_BY_NAME: Final = {dtype.name: dtype for dtype in _ALL}
_BY_CODE: Final = {dtype.code: dtype for dtype in _ALL}


def by_name(name: str) -> Dtype:
    """The type that torch calls `name` (without `torch.`). Raises ManifestError."""
    return _found(_BY_NAME.get(name), name)


def by_code(code: str) -> Dtype:
    """The type that safetensors calls `code`. Raises ManifestError."""
    return _found(_BY_CODE.get(code), code)


def _found(dtype: Dtype | None, asked: str) -> Dtype:
    if dtype is None:
        raise ManifestError(f"tensors of type {asked} cannot be published; expected one of {', '.join(_BY_NAME)}")
    return dtype
