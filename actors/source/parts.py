"""What an epoch of files is made of, whatever their format.

    entry --files--> ranges --shards, in a seeded order--> parts --gathered to about WINDOW_BYTES--> windows, rows shuffled

A shard is visited as a whole and gives its parts in an order of its own; the rows of one window are shuffled together. Data
below one window, which is most of it, is therefore shuffled as a whole; terabytes within windows of randomly chosen shards.
Invariant: shards, parts and their rows follow from the files, the seed and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from physarum.actors.source.permutation import Permutation

WINDOW_BYTES: Final = 256 << 20
HELD_WEIGHT: Final = 4
"""What a window holds in memory weighs this much more than what it only knows the places of."""

Key = tuple[object, ...]
"""What fixes a shuffle."""


class OpenPart(Protocol):
    """Rows of one file that are addressed together."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        """Its place, for messages, and the row as the file has it. Raises RowError that names the place."""
        ...


class Part(Protocol):
    @property
    def weight(self) -> int:
        """Bytes, about."""
        ...

    def open(self) -> OpenPart:
        """Cheap enough for a window that is only counted."""
        ...


class Shard(Protocol):
    def parts(self, key: Key | None) -> Iterator[Part]:
        """Shuffled by `key`, or as written. Raises UnusableSourceError for a file that cannot be read."""
        ...


class Window:
    """The rows of some parts, addressed by one index."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [part.open() for part in parts]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> tuple[str, dict[str, Any]]:
        at = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[at - 1]) if at else 0
        return self._parts[at].row(index - before)


def windows(shards: Sequence[Shard], key: Key | None, window_bytes: int = WINDOW_BYTES) -> Iterator[list[Part]]:
    """The parts of an epoch, gathered to about `window_bytes`."""
    group: list[Part] = []
    size = 0
    for part in _parts(shards, key):
        if group and size + part.weight > window_bytes:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.weight
    if group:
        yield group


def _parts(shards: Sequence[Shard], key: Key | None) -> Iterator[Part]:
    order = None if key is None or not shards else Permutation(len(shards), *key)
    for place in range(len(shards)):
        index = place if order is None else order(place)
        yield from shards[index].parts(None if key is None else (*key, index))
