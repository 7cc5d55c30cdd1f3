"""Mark and sweep: no interleaving of writers, messages, trims, sweeps and deaths takes a blob that something refers to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from physarum.bus import blob_removal
from physarum.bus.blob_sweep import Sweeper
from physarum.bus.blobs import ASIDE_PREFIX, BlobRef, BlobStore
from physarum.bus.errors import BusError

GRACE_S = 30.0
BLOBS = 3


class Died(BaseException):
    """The process that sweeps is killed here."""


class Swept:
    """A store as a sweep sees it."""

    def __init__(self, store: BlobStore) -> None:
        self.identity = str(store.folder)
        self.store = store

    async def listing(self) -> dict[str, int]:
        return blob_removal.listing(self.store)

    async def remove(self, listed: Mapping[str, int]) -> int:
        return blob_removal.remove(self.store, listed)


@contextlib.contextmanager
def calls(hook: Callable[[], None]) -> Iterator[None]:
    """`hook` runs before each call by which a removal touches the disk; what the hook itself does is not counted."""
    inside = False

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            if not inside:
                inside = True
                try:
                    hook()
                finally:
                    inside = False
            return real(*arguments, **named)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in ((os, "rename"), (os, "link"), (Path, "stat"), (Path, "unlink")):
            stack.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))
        yield


class World:
    """One store, its writers and its messages. `pending`: stored by a live writer, its message not published yet."""

    def __init__(self, folder: Path) -> None:
        self.store = BlobStore(folder)
        self.now = 0.0
        self.pending: set[int] = set()
        self.published: set[int] = set()
        self.sweeper = Sweeper(GRACE_S, lambda: self.now)

    def data(self, number: int) -> bytes:
        return b"blob %d" % number * 10

    def ref(self, number: int) -> BlobRef:
        return BlobRef.of(self.data(number))

    def put(self, number: int) -> None:
        self.store.put(self.data(number))
        self.pending.add(number)

    def publish(self, number: int) -> None:
        if number in self.pending:
            self.pending.remove(number)
            self.published.add(number)

    def abandon(self, number: int) -> None:
        """The writer dies before it publishes."""
        self.pending.discard(number)

    def trim(self, number: int) -> None:
        self.published.discard(number)

    def wait(self, seconds: float) -> None:
        """Writers whose message waits keep their blobs young (Blobs.held)."""
        self.now += seconds
        for number in self.pending:
            self.store.put(self.data(number))

    async def mark(self) -> set[str]:
        return {self.ref(number).digest for number in self.published}

    def sweep(self, interfere_at: int = -1, interfere: Callable[[], None] = lambda: None) -> None:
        """`interfere` runs at the so-many-th call on the disk; it may die, which forgets all that the sweeper knew."""
        counted = 0

        def hook() -> None:
            nonlocal counted
            counted += 1
            if counted == interfere_at:
                interfere()

        try:
            with calls(hook):
                asyncio.run(self.sweeper.sweep([Swept(self.store)], self.mark))
        except Died:
            self.sweeper = Sweeper(GRACE_S, lambda: self.now)

    def condemn(self) -> None:
        """What nothing refers to now is removed by the next sweep."""
        self.sweep()
        self.wait(GRACE_S)
        self.sweep()

    def check(self) -> None:
        for number in self.published | self.pending:
            assert self.store.get(self.ref(number)) == self.data(number)

    def left(self) -> list[Path]:
        return [path for path in self.store.folder.rglob("*") if path.is_file()]


def _die() -> None:
    raise Died


numbers = st.integers(0, BLOBS - 1)
simple = st.one_of(
    st.tuples(st.sampled_from(["put", "publish", "abandon", "trim"]), numbers),
    st.tuples(st.just("wait"), st.sampled_from([5, 20, 40])),
)
sweeps = st.tuples(st.just("sweep"), st.integers(0, 30), st.lists(simple, max_size=3), st.booleans())


@settings(max_examples=300)
@given(st.lists(st.one_of(simple, sweeps), max_size=25))
def test_no_interleaving_removes_what_is_referred_to_and_the_rest_goes_away(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for step in steps:
            if step[0] != "sweep":
                getattr(world, step[0])(step[1])
            else:
                _, at, others, dies = step

                def interfere(others: list[tuple[str, int]] = others, dies: bool = dies) -> None:
                    for name, argument in others:
                        getattr(world, name)(argument)
                        world.check()
                    if dies:
                        raise Died

                world.sweep(at, interfere)
            world.check()
        kept = sorted(world.ref(number).digest for number in world.published)
        world.pending.clear()
        world.condemn()
        world.sweep()
        assert sorted(path.name for path in world.left()) == kept
        world.published.clear()
        world.sweep()
        world.sweep()
        assert world.left() == []


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_blob_that_is_stored_again_during_its_removal_stays(tmp_path: Path, moment: int) -> None:
    """At each call on the disk in turn; the removal's own death right after it changes nothing."""
    for dies in (False, True):
        world = World(tmp_path / str(dies))
        world.put(0)
        world.abandon(0)
        world.condemn()
        reached = False

        def again(world: World = world, dies: bool = dies) -> None:
            nonlocal reached
            reached = True
            world.put(0)
            if dies:
                raise Died

        world.sweep(moment, again)
        if reached:
            world.check()
            world.sweep()
            world.check()


@pytest.mark.parametrize("moment", range(1, 7))
def test_a_removal_that_is_killed_is_finished_by_the_next_sweeper(tmp_path: Path, moment: int) -> None:
    world = World(tmp_path)
    world.put(0)
    world.abandon(0)
    world.condemn()
    world.sweep(moment, _die)
    assert len(world.left()) == 1, "dead before its last call"
    world.condemn()
    world.sweep()
    assert world.left() == []


def test_every_moment_of_a_removal_was_met(tmp_path: Path) -> None:
    """The test above cannot fail at a moment that no removal reaches: a removal makes at least six calls."""
    world = World(tmp_path)
    world.put(0)
    world.abandon(0)
    world.condemn()
    met = []
    world.sweep(6, lambda: met.append(True))
    assert met and world.left() == []


def test_what_is_young_stays_however_far_the_clock_is_set(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.put(0)
    os.utime(world.store.path(world.ref(0).digest), (0, 0))  # as after a clock that was set forward by years
    world.abandon(0)
    world.sweep()
    world.now += GRACE_S - 1
    world.sweep()
    world.sweep()
    assert world.store.get(world.ref(0)) == world.data(0)
    world.now += 1
    world.sweep()
    world.sweep()
    assert world.left() == []


def test_what_a_dead_writer_left_half_written_goes_away(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.put(0)
    world.publish(0)
    aside = world.store.path(world.ref(0).digest).parent / f"{ASIDE_PREFIX}x1"
    aside.write_bytes(b"half")
    world.condemn()
    world.sweep()
    assert [path.name for path in world.left()] == [world.ref(0).digest]


def test_an_incomplete_mark_removes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.put(0)
    world.abandon(0)
    world.condemn()

    async def fails() -> set[str]:
        raise BusError("the bus is away")

    with pytest.raises(BusError):
        asyncio.run(world.sweeper.sweep([Swept(world.store)], fails))
    assert len(world.left()) == 1


def test_a_reference_that_one_mark_did_not_see_is_not_lost(tmp_path: Path) -> None:
    """A replica of a stream that lags behind its leader shows a message later."""
    world = World(tmp_path)
    world.put(0)
    world.abandon(0)
    world.condemn()  # these marks miss it
    world.published.add(0)
    world.sweep()
    world.published.clear()
    world.sweep()
    world.published.add(0)
    world.check()
