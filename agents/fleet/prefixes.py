"""What an engine's prefix cache probably holds: the hashed blocks of the prompts that were sent there, newest first.

A block's hash goes over the block and the hash of the one before it, so that one hash names a whole prefix. Invariant: at
most `capacity` tokens are believed, and none that were sent before the engine took other weights: its cache is partitioned
by version. It is a guess (others send, too, and the engine evicts as it likes); a wrong one costs a prefill, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK: Final = 128
"""Tokens; a shared prefix shorter than this is not worth a choice."""
_MOST_BLOCKS: Final = 512
"""Of one prompt; what lies behind 64k tokens is taken as not shared."""


def prefix_blocks(tokens: npt.NDArray[np.int32]) -> list[int]:
    """The chained hash of each whole block of `tokens` [P]."""
    data = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    size, hashes, last = 4 * BLOCK, [], 0
    for start in range(0, min(len(data) // size, _MOST_BLOCKS) * size, size):
        last = xxhash.xxh3_64_intdigest(data[start : start + size], seed=last)
        hashes.append(last)
    return hashes


class KnownPrefixes:
    """Of one engine. `capacity` in tokens."""

    def __init__(self, capacity: int) -> None:
        self._most = max(1, capacity // BLOCK)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._version = ""

    def __len__(self) -> int:
        return len(self._blocks)

    def serve(self, version: str, capacity: int) -> None:
        """What the engine serves now; with other weights it knows nothing."""
        if version != self._version:
            self._blocks.clear()
        self._version, self._most = version, max(1, capacity // BLOCK)

    def shared(self, blocks: Sequence[int]) -> int:
        """Leading tokens that the engine probably holds."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt was sent there. Its last block is the first to be forgotten, as in a tree that loses its leaves."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
