"""Safetensors files whose bytes stand at offsets that are known before they arrive.

Format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header (name to dtype, shape
and data_offsets), then the data. The header is padded with spaces so that the data begin at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from physarum.weightsync.dtypes import by_code, by_name
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.manifest import Manifest

FILE_NAME: Final = "model.safetensors"
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Of the files of a model's folder that hold its weights, or say where they are."""

_ALIGNMENT: Final = 64
_LENGTH: Final = struct.Struct("<Q")
_LARGEST_HEADER: Final = 100_000_000  # the reference implementation's own limit
_CONVERTED: Final = ("float64", "float32", "float16", "bfloat16", "float8_e8m0fnu")
"""Types of weights and scales that an engine converts into its own as it loads; all others are codes, and must be equal."""


class Form(msgspec.Struct, frozen=True):
    """Type and shape of a tensor, without its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * by_name(self.dtype).size_bytes


class Layout(msgspec.Struct, frozen=True):
    """Where tensors stand in one file: `offsets` by name, in bytes from its beginning."""

    header: bytes
    size_bytes: int
    offsets: dict[str, int]


def lay_out(forms: Mapping[str, Form], label: str, room: int = 0) -> Layout:
    """Tensors in the order given, without gaps, behind a header of at least `room` bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "version": label}}
    offsets: dict[str, int] = {}
    end = 0
    for name, form in forms.items():
        offsets[name] = end
        end += form.size_bytes
        header[name] = {"dtype": by_name(form.dtype).code, "shape": form.shape, "data_offsets": [offsets[name], end]}
    text = msgspec.json.encode(header)
    text += b" " * max(room - _LENGTH.size - len(text), 0)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    head = _LENGTH.pack(len(text)) + text
    return Layout(head, len(head) + end, {name: len(head) + offset for name, offset in offsets.items()})


def read_layout(source: BinaryIO) -> tuple[dict[str, Form], dict[str, int]]:
    """Forms and offsets (from the beginning) of the tensors of a safetensors file. Raises ManifestError."""
    entries, start = _header(source)
    forms = {name: _form(entry) for name, entry in entries.items()}
    offsets = {name: start + int(entry["data_offsets"][0]) for name, entry in entries.items()}
    return forms, offsets


def forms_in(folder: Path) -> dict[str, Form]:
    """Names, types and shapes of all tensors in the safetensors files of a model folder. Raises ManifestError."""
    forms: dict[str, Form] = {}
    for file in sorted(folder.glob("*.safetensors")):
        forms |= _forms(file)
    if not forms:
        raise ManifestError(f"{folder} holds no safetensors file; expected a Hugging Face model folder")
    return forms


def _forms(file: Path) -> dict[str, Form]:
    with file.open("rb") as source:
        return read_layout(source)[0]


def _header(source: BinaryIO) -> tuple[dict[str, dict[str, Any]], int]:
    """The entries, and where the data begin."""
    length = source.read(_LENGTH.size)
    size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else _LARGEST_HEADER + 1
    if size > _LARGEST_HEADER:
        raise ManifestError(f"{source.name} is no safetensors file: its header would be {size} bytes")
    try:
        entries = msgspec.json.decode(source.read(size), type=dict[str, dict[str, Any]])
        entries.pop("__metadata__", None)
        for entry in entries.values():
            _form(entry)
            int(entry["data_offsets"][0])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ManifestError(f"{source.name} has no readable safetensors header: {error}") from error
    return entries, _LENGTH.size + size


def _form(entry: Mapping[str, Any]) -> Form:
    return Form(by_code(entry["dtype"]).name, tuple(entry["shape"]))


def check_fits(manifest: Manifest, expected: dict[str, Form]) -> None:
    """Raises ManifestError unless `manifest` holds exactly the tensors of `expected`.

    SGLang keeps silent about tensors that a checkpoint lacks, and would serve a mixture of two versions.
    """
    found = {tensor.name: Form(tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    lacking, strange = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if lacking or strange:
        raise ManifestError(
            f"{manifest.label} does not hold the tensors of the model that the engine serves:"
            f" {len(lacking)} are absent {lacking[:3]}, {len(strange)} are unknown {strange[:3]}"
        )
    wrong = next((name for name, form in expected.items() if found[name].shape != form.shape), None)
    if wrong is not None:
        raise ManifestError(
            f"{manifest.label}: tensor {wrong} has shape {found[wrong].shape}, the engine's has {expected[wrong].shape}"
        )
    strange_type = next((name for name, form in expected.items() if not _loads(found[name].dtype, form.dtype)), None)
    if strange_type is not None:
        raise ManifestError(
            f"{manifest.label}: tensor {strange_type} is {found[strange_type].dtype}, the engine's is"
            f" {expected[strange_type].dtype}: one of them is quantised in another way"
        )


def _loads(found: str, expected: str) -> bool:
    return found == expected or (found in _CONVERTED and expected in _CONVERTED)
