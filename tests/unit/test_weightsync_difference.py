"""A chunk as what changed since another one: whatever was encoded comes back, and rubbish is refused by name."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from physarum.weightsync.difference import WIDTHS, apply_difference, encode_difference
from physarum.weightsync.differences import Differences
from physarum.weightsync.errors import ChunkAlteredError
from physarum.weightsync.pace import Pace

ELEMENTS = 4096


def chunk(width: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(width * ELEMENTS))


def changed(old: bytearray, width: int, share: float, seed: int = 1, by: int = 1) -> bytearray:
    """`share` of the elements differ by `by` in their lowest byte."""
    new = bytearray(old)
    where = np.random.default_rng(seed).permutation(ELEMENTS)[: int(share * ELEMENTS)]
    np.frombuffer(new, np.uint8)[where * width] ^= by
    return new


def applied(data: bytes, old: bytearray, width: int) -> bytearray:
    target = bytearray(len(old))
    apply_difference(data, memoryview(old), width, memoryview(target))
    return target


@given(st.sampled_from(WIDTHS), st.floats(0.0, 1.0), st.integers(0, 99), st.integers(1, 255))
def test_what_was_encoded_comes_back(width: int, share: float, seed: int, by: int) -> None:
    old = chunk(width, seed)
    new = changed(old, width, share, seed, by)
    data = encode_difference(memoryview(new), memoryview(old), width)
    if data is not None:
        assert len(data) < len(new) and applied(data, old, width) == new


@pytest.mark.parametrize(("share", "kind", "most"), [(0.01, b"S", 0.02), (0.1, b"S", 0.1), (0.9, b"X", 0.3)])
def test_the_smaller_form_is_sent(share: float, kind: bytes, most: float) -> None:
    """As share of a bfloat16 chunk."""
    old = chunk(2)
    data = encode_difference(memoryview(changed(old, 2, share)), memoryview(old), 2)
    assert data is not None and data[:1] == kind and len(data) < most * len(old)


@pytest.mark.parametrize(
    ("other", "width"), [(chunk(2, 9), 2), (chunk(2)[:-2], 2), (chunk(2), 3), (chunk(2), 0), (chunk(2)[:-1], 2)]
)
def test_what_does_not_compare_is_no_difference(other: bytearray, width: int) -> None:
    assert encode_difference(memoryview(chunk(2)), memoryview(other), width) is None


def sparse(count: int, gaps: bytes, values: bytes) -> bytes:
    packed = [zstandard.compress(part) for part in (gaps, values)]
    return b"S" + count.to_bytes(4, "little") + len(packed[0]).to_bytes(4, "little") + b"".join(packed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?" + zstandard.compress(b"x"),
        b"X",
        b"X" + b"no frame",
        b"X" + zstandard.compress(bytes(2 * ELEMENTS - 2)),
        b"X" + zstandard.compress(bytes(1 << 28)),  # a frame that would fill the memory
        b"X" + zstandard.compress(bytes(2 * ELEMENTS))[:-1],
        b"S",
        sparse(ELEMENTS + 1, bytes(4 * (ELEMENTS + 1)), bytes(2 * (ELEMENTS + 1))),
        sparse(1, b"\xff\xff\xff\xff", b"xx"),  # beyond the end
        sparse(2, bytes(4), bytes(4)),
    ],
)
def test_bytes_that_are_no_difference_are_refused(data: bytes) -> None:
    with pytest.raises(ChunkAlteredError):
        applied(data, chunk(2), 2)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for kind in (b"S", b"X"):
        with pytest.raises(ChunkAlteredError):
            applied(kind + data, chunk(2), 2)


def test_each_is_computed_once_whoever_asks_meanwhile() -> None:
    kept, begun, go = Differences(), threading.Event(), threading.Event()
    computed: list[int] = []

    def compute() -> bytes:
        computed.append(1)
        begun.set()
        assert go.wait(10)
        return b"x"

    found: list[bytes | None] = []
    threads = [threading.Thread(target=lambda: found.append(kept.get(("a", "b", 2), compute))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert found == [b"x"] * 4 and len(computed) == 1


def test_only_as_many_are_kept_as_fit_and_a_failure_is_not_one() -> None:
    kept = Differences(kept_bytes=2000)
    made: list[int] = []

    def make(number: int) -> bytes:
        made.append(number)
        return bytes(600)

    for number in (1, 2, 1, 3, 1, 2):  # the third drops the second: the first was asked for later
        kept.get((str(number), "base", 2), lambda number=number: make(number))  # type: ignore[misc]
    assert made == [1, 2, 3, 2]
    with pytest.raises(OSError, match="gone"):
        kept.get(("x", "base", 2), lambda: (_ for _ in ()).throw(OSError("gone")))
    assert kept.get(("x", "base", 2), lambda: None) is None


def test_one_that_failed_while_another_was_accounted_stays_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a computation's end and its account another one's account saw it as done, and dropped it by its result."""
    kept = Differences(kept_bytes=1000)
    account, late = kept._account, []
    monkeypatch.setattr(kept, "_account", lambda key, done: late.append((key, done)))
    with pytest.raises(OSError, match="gone"):
        kept.get(("failed", "base", 2), lambda: (_ for _ in ()).throw(OSError("gone")))
    kept.get(("first", "base", 2), lambda: bytes(600))
    kept.get(("second", "base", 2), lambda: bytes(600))
    kept.close()  # all have ended, and said so
    for key, done in reversed(late):
        account(key, done)
    assert set(kept._found) == {("first", "base", 2)} and kept._bytes == 600 + 256


def test_the_quicker_way_is_taken_and_the_other_one_tried_again() -> None:
    pace, costs, chosen = Pace("auto"), {True: 2.0, False: 1.0}, []
    for step in range(300):
        if step == 150:
            costs = {True: 0.5, False: 1.0}  # the network became slow
        way = pace.chosen()
        chosen.append(way)
        pace.took(way, costs[way])
    assert sum(chosen[:150]) <= 8 and sum(chosen[-50:]) >= 45
    assert all(Pace("always").chosen() for _ in range(3)) and not Pace("never").chosen()


def test_a_way_that_fails_is_not_the_quicker_one_however_soon_it_fails() -> None:
    pace = Pace("auto")
    chosen = []
    for _ in range(100):
        way = pace.chosen()
        chosen.append(way)
        if way:
            pace.failed_as_difference()
        else:
            pace.took(False, 1.0)
    assert sum(chosen) <= 3 + 100 // 32
    pace.took(True, 0.5)  # it comes as a difference again
    assert sum(pace.chosen() for _ in range(20)) == 20
