"""Names of content: xxh3-128 for integrity inside a run, blake3 where the holder of the bytes is not trusted.

Text form: 32 hex digits for xxh3-128; `b3-` and 64 hex digits for blake3, so that a digest itself says how to check it.
"""

from __future__ import annotations

import re
from typing import Final, Literal

import blake3
import xxhash

from physarum.weightsync.errors import ChunkAlteredError

Algorithm = Literal["xxh3", "blake3"]
Bytes = bytes | bytearray | memoryview

_BLAKE3_PREFIX: Final = "b3-"
_FORM: Final = re.compile(r"[0-9a-f]{32}|b3-[0-9a-f]{64}")


def digest_of(data: Bytes, algorithm: Algorithm = "xxh3") -> str:
    """The digest of `data` (a memoryview must be contiguous). Large inputs release the GIL: hash them in a thread."""
    if algorithm == "blake3":
        return _BLAKE3_PREFIX + blake3.blake3(data).hexdigest()
    return xxhash.xxh3_128_hexdigest(data)


def algorithm_of(digest: str) -> Algorithm:
    return "blake3" if digest.startswith(_BLAKE3_PREFIX) else "xxh3"


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a digest: only such text may become a file name."""
    return _FORM.fullmatch(text) is not None


def verify(data: Bytes, digest: str, where: str) -> None:
    """Raises ChunkAlteredError, naming `where` the bytes came from, when they are not what `digest` says."""
    found = digest_of(data, algorithm_of(digest))
    if found != digest:
        raise ChunkAlteredError(
            f"{where}: {len(data)} bytes have digest {found}, expected {digest}; they were altered or cut on the way"
        )
