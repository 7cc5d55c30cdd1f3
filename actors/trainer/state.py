"""Training state on disk without pickle: tensors as safetensors, the rest as msgpack.

Invariant: `read_state` returns what `write_state` was given, bit for bit, types included (dict keys, tuples, ints,
None); both files are flushed to the device before `write` returns. Renaming and syncing the folder is the
caller's.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgpack
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from physarum.actors.trainer.errors import StateMismatch, StateNotWritten

Tree: TypeAlias = Any
"""Nested dicts (str or int keys), lists and tuples; leaves: tensors, str, int, float, bool, None, bytes."""

_TENSOR, _TUPLE = 1, 2
"""msgpack extension codes: a reference to tensor number n; a packed list that was a tuple."""


class Copied(NamedTuple):
    """A tree as it was, whatever its tensors become afterwards; `tensors` are on the host."""

    name: str
    skeleton: bytes
    tensors: dict[str, Tensor]


def copied(tree: Tree, name: str) -> Copied:
    """For `write`, at any time and in any thread. Raises TypeError on other leaves."""
    tensors: dict[str, Tensor] = {}
    skeleton = msgpack.packb(_detach(tree, tensors), use_bin_type=True)
    return Copied(name, skeleton, tensors)


def write_state(tree: Tree, folder: Path, name: str) -> None:
    """`copied` and `write` at once."""
    write(copied(tree, name), folder)


def write(state: Copied, folder: Path) -> None:
    """Write `name.safetensors` and `name.msgpack` into `folder`, which must exist. Raises StateNotWritten."""
    name = state.name
    tensor_path, tree_path = _paths(folder, name)
    try:
        save_file(state.tensors, tensor_path)
        tree_path.write_bytes(state.skeleton)
        for path in (tensor_path, tree_path):
            _flush(path)
    except (OSError, SafetensorError) as error:
        raise StateNotWritten(
            f"training state {name!r} could not be written to {folder} ({error}); "
            "expected a writable folder with room: free some and save again into a new folder"
        ) from error


def read_state(folder: Path, name: str) -> Tree:
    """Inverse of `write_state`, tensors on the CPU. Raises StateMismatch where a file is missing or damaged."""
    tensor_path, tree_path = _paths(folder, name)
    try:
        tensors = load_file(tensor_path)
        return _attach(tree_path.read_bytes(), tensors)
    except (OSError, SafetensorError, KeyError, ValueError, msgpack.UnpackException) as error:
        raise StateMismatch(
            f"training state {name!r} in {folder} is unreadable ({type(error).__name__}: {error}); "
            "expected the two files that this world saved: choose another checkpoint"
        ) from error


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.safetensors", folder / f"{name}.msgpack"


def _detach(node: Tree, tensors: dict[str, Tensor]) -> Tree:
    """The tree with tensors moved to `tensors` and replaced by references."""
    if isinstance(node, Tensor):
        key = str(len(tensors))
        tensors[key] = node.detach().to("cpu", copy=True).contiguous()
        return msgpack.ExtType(_TENSOR, key.encode())
    if isinstance(node, dict):
        return {key: _detach(value, tensors) for key, value in node.items()}
    if isinstance(node, list):
        return [_detach(value, tensors) for value in node]
    if isinstance(node, tuple):
        return msgpack.ExtType(_TUPLE, msgpack.packb([_detach(value, tensors) for value in node], use_bin_type=True))
    if node is None or isinstance(node, str | int | float | bytes):
        return node
    raise TypeError(f"training state holds a {type(node).__name__}; expected tensors, numbers, text, lists or dicts")


def _attach(data: bytes, tensors: dict[str, Tensor]) -> Tree:
    def restore(code: int, payload: bytes) -> Tree:
        if code == _TENSOR:
            return tensors[payload.decode()]
        if code == _TUPLE:
            return tuple(_attach(payload, tensors))
        raise ValueError(f"unknown extension {code}")

    return msgpack.unpackb(data, ext_hook=restore, strict_map_key=False, raw=False)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
