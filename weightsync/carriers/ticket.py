"""What lets others read a version out of a holder's memory: its place, where each tensor stands there, and for how long."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from physarum.weightsync.carriers.carrier import Place
from physarum.weightsync.manifest import Manifest


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """`carrier` by name; `offsets`: of each tensor; within `lease_s` seconds the holder overwrites nothing of it."""

    label: str
    carrier: str
    place: Place
    offsets: dict[str, int]
    lease_s: float


def chunk_offsets(manifest: Manifest, offsets: Mapping[str, int]) -> dict[str, int]:
    """Where each chunk stands, of a tensor whose offset is known."""
    found: dict[str, int] = {}
    for tensor in manifest.tensors:
        start = offsets.get(tensor.name)
        if start is None:
            continue
        for chunk in tensor.chunks:
            found.setdefault(chunk.digest, start)
            start += chunk.size
    return found
