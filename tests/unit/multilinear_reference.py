"""The definition in device/multilinear.py, written down once more, for the host."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ROW_WORDS: Final = 1024
ROW_BYTES: Final = 4 * ROW_WORDS
LANES: Final = (0x243F6A8885A308D3, 0x13198A2E03707344)
"""Seeds of the keys: the first digits of pi."""
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_BLOCK_ROWS: Final = 32
"""Worked on at once: what stays in a core's cache."""


def digest(data: Any) -> str:
    """32 hex digits. `data` is any contiguous buffer."""
    view = np.frombuffer(data, np.uint8)
    rows = -(-view.size // ROW_BYTES)
    sums = np.zeros((len(LANES), max(rows, 1)), np.uint64)
    whole = view.size // ROW_BYTES
    for start in range(0, whole, _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, whole)
        _row_sums(view[start * ROW_BYTES : end * ROW_BYTES], sums[:, start:end])
    if whole < rows:
        last = np.zeros(ROW_BYTES, np.uint8)
        last[: view.size - whole * ROW_BYTES] = view[whole * ROW_BYTES :]
        _row_sums(last, sums[:, whole:])
    return "".join(
        f"{int(_mix((_mix(sums[lane]) * row_keys(lane, sums.shape[1])).sum(keepdims=True) ^ np.uint64(view.size))[0]):016x}"
        for lane in range(len(LANES))
    )


def _row_sums(data: npt.NDArray[np.uint8], into: Words) -> None:
    words = data.view("<u4").reshape(-1, ROW_WORDS).astype(np.uint64)
    for lane in range(len(LANES)):
        into[lane] = (words * word_keys(lane)).sum(axis=1)


@functools.cache
def word_keys(lane: int) -> Words:
    """[ROW_WORDS], the a_j."""
    return _stream(LANES[lane], 0, ROW_WORDS)


def row_keys(lane: int, count: int) -> Words:
    """[count], the b_r; odd, so that no row's sum loses a bit."""
    power = 1 << max(count - 1, 0).bit_length()
    return _row_keys(lane, power)[:count]


@functools.cache
def _row_keys(lane: int, count: int) -> Words:
    return _stream(LANES[lane], ROW_WORDS, count) | np.uint64(1)


def _stream(seed: int, start: int, count: int) -> Words:
    """`count` outputs of SplitMix64 from the one with number `start`."""
    with np.errstate(over="ignore"):
        return _mix(np.uint64(seed) + np.arange(start + 1, start + 1 + count, dtype=np.uint64) * _GOLDEN)


def _mix(value: Words) -> Words:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
