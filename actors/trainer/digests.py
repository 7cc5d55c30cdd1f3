"""The digests of a checkpoint's files, and the digest of those: its own, which the ledger names. xxh3-128, hex."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import xxhash

from physarum.bus.codec import decode, encode

DIGESTS: Final = "digests.msgpack"
"""The file that has them: of every other file of the checkpoint."""
_READ_BYTES: Final = 8 << 20


class _Digests(msgspec.Struct, frozen=True):
    files: dict[str, str]


def write_digests(files: dict[str, str]) -> bytes:
    """A digest file."""
    return encode(_Digests(files))


def read_digests(listing: bytes) -> dict[str, str]:
    """By file name, from a digest file. Raises CodecError."""
    return decode(listing, _Digests).files


def digest_of(files: dict[str, str]) -> str:
    """The checkpoint's own digest."""
    listing = "\n".join(f"{name} {digest}" for name, digest in sorted(files.items()))
    return xxhash.xxh3_128_hexdigest(listing.encode())


def file_digest(file: Path) -> str:
    """Of one file's bytes. Blocking."""
    state = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()
