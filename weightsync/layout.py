"""One safetensors file from the chunks of a manifest, at offsets known before the first byte arrives.

Format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header (name to dtype, shape
and data_offsets), then the data. The header is padded with spaces so that the data begin at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import msgspec

from physarum.weightsync.dtypes import by_code, by_name
from physarum.weightsync.errors import ManifestError
from physarum.weightsync.manifest import Manifest

FILE_NAME: Final = "model.safetensors"

_ALIGNMENT: Final = 64
_LENGTH: Final = struct.Struct("<Q")
_LARGEST_HEADER: Final = 100_000_000  # the reference implementation's own limit


class Form(msgspec.Struct, frozen=True):
    """Type and shape of a tensor, without its values."""

    dtype: str
    shape: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    """`places`: for each chunk its size and every offset in the file at which its bytes stand."""

    header: bytes
    size_bytes: int
    places: dict[str, tuple[int, list[int]]]


def lay_out(manifest: Manifest) -> Layout:
    """Tensors in the order of the manifest, without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "version": manifest.label}}
    end = 0
    for tensor in manifest.tensors:
        offsets = [end, end + tensor.size_bytes]
        header[tensor.name] = {"dtype": by_name(tensor.dtype).code, "shape": tensor.shape, "data_offsets": offsets}
        end = offsets[1]
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    head = _LENGTH.pack(len(text)) + text
    return Layout(head, len(head) + end, _places(manifest, len(head)))


def _places(manifest: Manifest, start: int) -> dict[str, tuple[int, list[int]]]:
    places: dict[str, tuple[int, list[int]]] = {}
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            places.setdefault(chunk.digest, (chunk.size, []))[1].append(start)
            start += chunk.size
    return places


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
        length = source.read(_LENGTH.size)
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else _LARGEST_HEADER + 1
        if size > _LARGEST_HEADER:
            raise ManifestError(f"{file} is no safetensors file: its header would be {size} bytes")
        text = source.read(size)
    try:
        entries = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        return {
            name: Form(by_code(entry["dtype"]).name, tuple(entry["shape"]))
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (msgspec.DecodeError, KeyError) as error:
        raise ManifestError(f"{file} has no readable safetensors header: {error}") from error


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
