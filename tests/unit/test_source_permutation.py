"""The shuffle visits everything exactly once, differs between epochs, and needs no memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.source.permutation import Permutation


@given(st.integers(1, 700), st.integers(0, 2**64), st.integers(0, 5))
def test_every_size_and_key_gives_a_bijection(size: int, seed: int, epoch: int) -> None:
    permutation = Permutation(size, seed, "rows", epoch)
    assert sorted(permutation(index) for index in range(size)) == list(range(size))


def test_a_position_alone_defines_the_row() -> None:
    size = 10**12
    first = [Permutation(size, 7, "rows", 3)(index) for index in (0, 1, size - 1)]
    assert first == [Permutation(size, 7, "rows", 3)(index) for index in (0, 1, size - 1)]
    assert len(set(first)) == 3
    assert all(0 <= value < size for value in first)


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = {
        tuple(Permutation(50, seed, "rows", epoch)(index) for index in range(50)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_neighbours_are_scattered() -> None:
    """Of 10,000 steps of a random order about 2 in 10,000 go to a neighbour; an order that keeps runs has far more."""
    permutation = Permutation(10_000, 1)
    order = [permutation(index) for index in range(10_000)]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 12


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError, match=r"index 5 of a permutation of \[0, 5\)"):
        Permutation(5)(5)
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0)
