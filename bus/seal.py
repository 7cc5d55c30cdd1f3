"""The seal of a stopped store: a digest of each of its files, written when the server ended in order.

nats-server trusts its index after an orderly stop and looks at a message's checksum only when somebody reads it: altered
bytes then are messages that never arrive, and a missing file is an emptier stream. The seal notices both before the
server starts. Invariant: a seal describes the store as it lies; whoever starts a server on the store breaks it first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from physarum.bus.blobs import fsync_folder
from physarum.bus.errors import StoreAlteredError

_READ_BYTES: Final = 8 << 20
_NAMED: Final = 3


class Seal(msgspec.Struct, frozen=True):
    """xxh3-128 of each file, by its path below the store."""

    files: dict[str, str]


def close(store: Path, path: Path) -> None:
    """Seals the store of a server that has ended in order. Blocking; reads every byte of the store."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_bytes(msgspec.json.encode(_look(store)))
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    fsync_folder(path.parent)


def verify(store: Path, path: Path) -> None:
    """Raises StoreAlteredError when the store is not as it was sealed; without a seal (a crash) nothing is known.

    Blocking; reads every byte of the store.
    """
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=Seal).files
    except FileNotFoundError:
        return
    except msgspec.DecodeError as error:
        raise StoreAlteredError(
            f"{path} is no seal of a store ({error}); restore the folder {path.parent} from a copy, or remove {path} to"
            " have nats-server recover what it can"
        ) from error
    found = _look(store).files
    faults = [f"{name} is missing" for name in sorted(sealed.keys() - found.keys())]
    faults += [
        f"{name} has digest {found[name]}, expected {digest}"
        for name, digest in sorted(sealed.items())
        if name in found and found[name] != digest
    ]
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise StoreAlteredError(
            f"the store {store} is not as its server left it: {'; '.join(faults[:_NAMED])}{more}. Restore it from a copy of"
            f" the run folder, or start a new run (`run.name=NAME`); to go on with what nats-server can recover, remove {path}"
        )


def break_(path: Path) -> None:
    """The store is about to change."""
    path.unlink(missing_ok=True)


def _look(store: Path) -> Seal:
    files = (file for file in sorted(store.rglob("*")) if file.is_file())
    return Seal({str(file.relative_to(store)): _digest(file) for file in files})


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()
