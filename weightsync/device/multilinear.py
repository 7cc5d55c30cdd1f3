"""The digest of ../multilinear.py, of many chunks of one buffer at once, where the buffer is. Stands alone: torch only.

Invariant: equal to the host's, bit for bit, on every device. Integers are signed here, and wrap all the same.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ROW_WORDS = 1024
ROW_BYTES = 4 * ROW_WORDS
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SLAB_ROWS = 1 << 14
"""Worked on at once, 64 MiB: bounds what is needed beside the buffer."""


def digests(buffer: Tensor, chunks: list[tuple[int, int]]) -> list[str]:
    """Of each (offset, bytes) of `buffer` (uint8, contiguous). Offsets are multiples of ROW_BYTES, and from a chunk's last
    byte to the next such multiple the buffer is zero."""
    sums = row_sums(buffer)
    rows = [-(-size // ROW_BYTES) for _, size in chunks]
    count, device = len(chunks), buffer.device
    lengths = torch.tensor(rows, device=device)
    owner = torch.repeat_interleave(torch.arange(count, device=device), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(len(owner), device=device) - first[owner]
    starts = torch.tensor([offset // ROW_BYTES for offset, _ in chunks], device=device)
    sizes = torch.tensor([size for _, size in chunks], device=device)
    longest = max(rows, default=0)
    lanes = []
    for lane in range(len(_SEEDS)):
        keys = _keys(lane, ROW_WORDS, max(longest, 1)).to(device) | 1
        terms = _mix(sums[lane][starts[owner] + within]) * keys[within]
        totals = torch.zeros(count, dtype=torch.int64, device=device).index_add_(0, owner, terms)
        empty = (lengths == 0).to(torch.int64) * _mix(torch.zeros(1, dtype=torch.int64, device=device)) * keys[0]
        lanes.append(_mix((totals + empty) ^ sizes).tolist())
    return ["".join(f"{value & (2**64 - 1):016x}" for value in one) for one in zip(*lanes, strict=True)]


def row_sums(buffer: Tensor) -> list[Tensor]:
    """For each lane s_r of all whole rows of the buffer, [rows] int64."""
    count = buffer.numel() // ROW_BYTES
    words = buffer[: count * ROW_BYTES].view(torch.int32).view(count, ROW_WORDS)
    sums = [torch.empty(count, dtype=torch.int64, device=buffer.device) for _ in _SEEDS]
    keys = [_keys(lane, 0, ROW_WORDS).to(buffer.device) for lane in range(len(_SEEDS))]
    for start in range(0, count, _SLAB_ROWS):
        slab = words[start : start + _SLAB_ROWS].to(torch.int64) & 0xFFFFFFFF
        for lane, key in enumerate(keys):
            torch.sum(slab * key, dim=1, out=sums[lane][start : start + _SLAB_ROWS])
    return sums


@functools.cache
def _keys(lane: int, start: int, count: int) -> Tensor:
    return _mix(_signed(_SEEDS[lane]) + torch.arange(start + 1, start + 1 + count) * _signed(_GOLDEN))


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, count: int) -> Tensor:
    """To the right, as if unsigned."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
