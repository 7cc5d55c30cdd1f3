"""Which chunks become which objects: a large chunk is one by itself, small ones share one.

A request to an object store takes some 30 ms before its first byte, and a connection carries some 90 MB/s: 4 MiB (the default
of `checkpoint.chunk_bytes`) are as long on their way as they are waited for, 8 MiB twice as long, while a norm of 8 KiB is
nothing but waiting. So a chunk of ALONE_BYTES or more is an object named by its content, which never moves twice; smaller ones
are put together in the manifest's order up to PACK_BYTES. A pack is sent again when one of its chunks has changed: they are
less than a hundredth of most models' bytes.
"""

from __future__ import annotations

from typing import Final

from physarum.weightsync.manifest import Manifest

ALONE_BYTES: Final = 1 << 20
PACK_BYTES: Final = 8 << 20


def pack(manifest: Manifest) -> list[tuple[str, ...]]:
    """Digests of the chunks of each object; every chunk in exactly one."""
    found: list[tuple[str, ...]] = []
    small: list[str] = []
    gathered = 0
    for digest, size in manifest.sizes().items():
        if size >= ALONE_BYTES:
            found.append((digest,))
            continue
        if small and gathered + size > PACK_BYTES:
            found.append(tuple(small))
            small, gathered = [], 0
        small.append(digest)
        gathered += size
    return [*found, tuple(small)] if small else found
