"""A digest that a device computes as fast as it reads: multilinear hashing of 32-bit words, 128 bits, of many pieces of one
buffer at once. Stands alone: torch only.

Rows of 1024 little-endian 32-bit words w (the last padded with zeros), two lanes with keys of their own:

    row r:   s_r = sum_j w_rj * a_j          (mod 2^64)
    piece:   t   = sum_r mix(s_r) * b_r      (mod 2^64)
    lane:    mix(t xor bytes)

Sums of products with random 64-bit keys find any difference in 32-bit words but with a chance of 2^-32 a lane (Carter and
Wegman 1981; Lemire and Kaser, "Strongly universal string hashing is fast", 2014, on multilinear hashing); the keys here are
fixed, so this guards against damage, not against an adversary. `mix` is the finaliser of SplitMix64 (Steele, Lea, Flood
2014), whose output also makes the keys; b_r are odd. Equal on every device, bit for bit: integers are signed here, and wrap
all the same.
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


def digests(buffer: Tensor, pieces: list[tuple[int, int]]) -> list[str]:
    """32 hex digits for each (offset, bytes) of `buffer` (uint8, contiguous). Offsets are multiples of ROW_BYTES, and from a
    piece's last byte to the next such multiple the buffer is zero."""
    end = max((offset + -(-size // ROW_BYTES) * ROW_BYTES for offset, size in pieces), default=0)
    sums = row_sums(buffer[:end])
    rows = [-(-size // ROW_BYTES) for _, size in pieces]
    count, device = len(pieces), buffer.device
    lengths = torch.tensor(rows, device=device)
    owner = torch.repeat_interleave(torch.arange(count, device=device), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(len(owner), device=device) - first[owner]
    starts = torch.tensor([offset // ROW_BYTES for offset, _ in pieces], device=device)
    sizes = torch.tensor([size for _, size in pieces], device=device)
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
