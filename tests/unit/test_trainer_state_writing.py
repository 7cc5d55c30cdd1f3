"""Writing beside training: what is waited for, whose failures are raised, and what a world that ends leaves waiting."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

dist = pytest.importorskip("torch.distributed")

from physarum.actors.trainer.errors import StateNotWritten  # noqa: E402
from physarum.actors.trainer.state_writing import StateWriting  # noqa: E402

pytestmark = pytest.mark.timeout(30)


def nothing() -> None:
    pass


def failing(error: BaseException) -> Callable[[], None]:
    def write() -> None:
        raise error

    return write


@pytest.fixture
def ranks() -> list[StateWriting]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = [StateWriting(rank, 3, store) for rank in range(3)]
    made[0].store = store  # type: ignore[attr-defined]  # it lives as long as they do
    return made


def test_it_is_written_when_the_slowest_rank_has(ranks: list[StateWriting]) -> None:
    let = threading.Event()

    def slow() -> None:
        assert let.wait(10)

    with ThreadPoolExecutor() as pool:
        for _ in range(2):  # a second one does not see what was told of the first
            let.clear()
            for rank in ranks:
                rank.begin(slow if rank is ranks[2] else nothing)
            waited = pool.submit(ranks[0].written, 10.0)
            ranks[1].join()
            assert not waited.done()
            let.set()
            waited.result(10)


def test_every_failure_is_named_and_the_next_one_may_succeed(ranks: list[StateWriting]) -> None:
    full = OSError(28, "No space left on device")
    wrong = StateNotWritten("it could not be written")
    wrong.__cause__ = full
    for rank, write in zip(ranks, (failing(wrong), nothing, failing(full)), strict=True):
        rank.begin(write)
    with pytest.raises(
        StateNotWritten, match="rank 0: StateNotWritten: it could.*; rank 2: OSError.*No space"
    ) as found:
        ranks[0].written(10)
    assert found.value.__cause__ is wrong
    for rank in ranks:
        rank.begin(nothing)
    ranks[0].written(10)


def test_what_is_no_refusal_is_raised_as_it_is(ranks: list[StateWriting]) -> None:
    for rank in ranks:
        rank.begin(failing(ValueError("a mistake")) if rank is ranks[0] else nothing)
    with pytest.raises(ValueError, match="a mistake"):
        ranks[0].written(10)


def test_a_silent_rank_has_a_deadline_that_is_named(ranks: list[StateWriting]) -> None:
    for rank in ranks[:2]:
        rank.begin(nothing)
    with pytest.raises(StateNotWritten, match="not all of 3 ranks .* within 0.2 s"):
        ranks[0].written(0.2)


def test_a_disk_of_rank_0_that_hangs_has_the_same_deadline(ranks: list[StateWriting]) -> None:
    let = threading.Event()
    for rank in ranks:
        rank.begin((lambda: let.wait(20) and None) if rank is ranks[0] else nothing)
    try:
        with pytest.raises(StateNotWritten, match="not all of 3 ranks .* within 0.2 s"):
            ranks[0].written(0.2)
    finally:
        let.set()


def test_a_failure_that_is_kept_does_not_keep_the_copy_of_the_state(ranks: list[StateWriting]) -> None:
    class Share:
        """As large as the model."""

    def save(share: Share) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise StateNotWritten("full") from error

    share = Share()
    gone = weakref.ref(share)
    ranks[0].begin(partial(save, share))
    del share
    for rank in ranks[1:]:
        rank.begin(nothing)
    with pytest.raises(StateNotWritten, match="full") as kept:
        ranks[0].written(10)
    assert kept.value.__cause__ is not None and gone() is None


@pytest.mark.parametrize("early", [True, False])
def test_a_world_that_ends_leaves_nobody_waiting(ranks: list[StateWriting], early: bool) -> None:
    for rank in ranks[:2]:
        rank.begin(nothing)
    with ThreadPoolExecutor() as pool:
        waited = None if early else pool.submit(ranks[0].written, 20.0)
        ranks[1].join()
        ranks[0].abandon()
        with pytest.raises(StateNotWritten, match="the world ended"):
            (waited or pool.submit(ranks[0].written, 20.0)).result(10)


def test_a_world_that_ended_with_its_store_is_known_at_once() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = StateWriting(0, 3, store)
    rank.begin(nothing)
    rank.abandon()
    del store
    started = time.monotonic()
    with pytest.raises(StateNotWritten, match="the world ended"):
        rank.written(20)
    assert time.monotonic() - started < 5
