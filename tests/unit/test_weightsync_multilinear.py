"""The digest that host and device compute: equal on both, and sensitive to what damages weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from multilinear_reference import digest

from physarum.weightsync.device.multilinear import ROW_BYTES, digests
from physarum.weightsync.transports.staged import ALIGNED


def on_the_device(parts: list[bytes]) -> list[str]:
    """Each part in a buffer of its own place, as a device holds it."""
    places, end = [], 0
    for part in parts:
        places.append((end, len(part)))
        end += -(-len(part) // ROW_BYTES) * ROW_BYTES
    buffer = torch.zeros(max(end, ROW_BYTES), dtype=torch.uint8)
    for (start, size), part in zip(places, parts, strict=True):
        if size:
            buffer[start : start + size] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return digests(buffer, places)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 4, 4095, 4096, 4097, 9000, 40_000, 140_000]), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_host_and_device_agree(sizes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 256, size, np.uint8).tobytes() for size in sizes]
    assert on_the_device(parts) == [digest(part) for part in parts]


@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 20_000), seed=st.integers(0, 2**31), data=st.data())
def test_every_changed_byte_is_found(size: int, seed: int, data: st.DataObject) -> None:
    content = bytearray(np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes())
    before = digest(content)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    original = np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
    assert (digest(content) == before) == (bytes(content) == original)


def test_two_negated_weights_are_found() -> None:
    """Sign bits alone: sums of 64-bit words times odd keys would cancel out."""
    weights = np.ones(4096, np.float32)
    before = digest(weights)
    for first, second in ((0, 1), (1, 3), (0, 2048), (7, 4095)):
        changed = weights.copy()
        changed[[first, second]] *= -1
        assert digest(changed) != before


@pytest.mark.parametrize("other", ["swapped rows", "swapped words", "moved zeros", "longer"])
def test_what_is_in_another_place_is_another_digest(other: str) -> None:
    content = np.random.default_rng(0).integers(0, 2**32, 8192, np.uint32)
    content[-64:] = 0
    changed = {
        "swapped rows": np.concatenate([content[1024:2048], content[:1024], content[2048:]]),
        "swapped words": np.concatenate([content[1:2], content[:1], content[2:]]),
        "moved zeros": np.concatenate([content[-64:], content[:-64]]),
        "longer": np.concatenate([content, np.zeros(16, np.uint32)]),
    }[other]
    assert digest(changed) != digest(content)


def test_transports_lay_tensors_out_in_rows() -> None:
    assert ALIGNED == ROW_BYTES
