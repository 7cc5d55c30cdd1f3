"""A seeded shuffle of [0, n) in constant memory: any position can be asked for, so a position alone defines a row.

A balanced Feistel network over the smallest even number of bits that covers n, walked until the value falls below n
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). It is a bijection for every key.
"""

from __future__ import annotations

from typing import Final

import xxhash

# Four rounds make a Feistel network a strong pseudo-random permutation (Luby and Rackoff, 1988); six cost little more
# and mix the very small domains of short files.
_ROUNDS: Final = 6


class Permutation:
    """A bijection of [0, size), fixed by `key`."""

    def __init__(self, size: int, *key: object) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements; expected at least one")
        self._size = size
        self._half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        seed = xxhash.xxh3_64_intdigest("/".join(map(str, key)).encode())
        self._keys = [xxhash.xxh3_64_intdigest(f"{seed}/{number}".encode()) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self._size

    def __call__(self, index: int) -> int:
        """Where `index` goes. On average fewer than four rounds of walking, since the network covers at most 4n values."""
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} of a permutation of [0, {self._size})")
        value = self._network(index)
        while value >= self._size:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            mixed = xxhash.xxh3_64_intdigest(right.to_bytes(8, "little"), seed=key)
            left, right = right, left ^ (mixed & self._mask)
        return left << self._half_bits | right
