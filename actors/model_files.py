"""The files of a model folder, by name, size and digest: what one machine gives another, and how it is known to be the same.

Invariant: a name leads nowhere but into its folder. Hidden files (caches of a hub's client) are no part of a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import xxhash

_PIECE_BYTES: Final = 1 << 22
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")


class ModelFile(msgspec.Struct, frozen=True, order=True):
    """`name`: relative, with `/`; `digest`: xxh3-128 of its bytes."""

    name: str
    size_bytes: int
    digest: str


def files_of(folder: Path) -> list[ModelFile]:
    """Every file, by name. Reads all of them: blocking."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found.append(ModelFile(name.as_posix(), path.stat().st_size, file_digest(path)))
    return found


def file_digest(path: Path) -> str:
    """xxh3-128, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def list_digest(files: list[ModelFile]) -> str:
    """Of a whole model."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(files)))


def is_the_same(folder: Path, files: list[ModelFile]) -> bool:
    """Whether a folder of this host holds these files. Weights are compared by size: an engine serves none before it has taken
    a version, whose bytes are verified. Blocking."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            return False
        if path.suffix not in _WEIGHTS and file_digest(path) != file.digest:
            return False
    return bool(files)


def checked_name(name: str) -> str:
    """Raises ValueError for one that leads out of its folder."""
    parts = name.split("/")
    if not all(parts) or any(part.startswith(".") for part in parts) or "\\" in name or "\0" in name:
        raise ValueError(f"found {name!r} as a file of a model; expected a relative name without hidden parts")
    return name
