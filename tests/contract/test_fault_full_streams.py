"""Streams that are full hold whoever writes to them, all the way to the source; nothing is dropped, nothing locks up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from bus_fixture import small_config
from fault_line import ChainedWorld, line

from physarum.actors.errors import UnrecoverableError
from physarum.bus import layout, ledger, log, names
from physarum.bus.connection import Bus
from physarum.bus.errors import StreamFullError
from physarum.bus.ledger import RollbackRecord
from physarum.bus.names import StreamKey
from physarum.bus.publisher import Publisher
from physarum.configs.bus import BusConfig

pytestmark = pytest.mark.timeout(60)

KIB = 1 << 10
ROWS = 200
STORE = [f"bus.max_store_bytes={(9 << 20) + 512 * KIB}", f"bus.tasks_max_bytes={256 * KIB}"]
LARGE = [f"source.args.size={ROWS}", "rollout.args.padding=4096", "age.admission=free"]
"""400 executions of 33 KiB: SAMPLES (5 MiB) holds 155 of them, EPISODES (256 KiB) seven."""


@pytest.fixture
def bus_config() -> BusConfig:
    return small_config(max_store_bytes=(9 << 20) + 512 * KIB, tasks_max_bytes=256 * KIB)


@pytest.fixture
def closed_gate() -> Iterator[None]:
    ChainedWorld.gate.clear()
    yield
    ChainedWorld.gate.set()


async def size_bytes(bus: Bus, key: StreamKey) -> int:
    return (await log.state(bus, key)).bytes


def limit_bytes(bus: Bus, config: BusConfig, key: StreamKey) -> int:
    (found,) = [one for one in layout.stream_configs(bus.run, config) if one.name == names.stream(bus.run, key)]
    return int(found.max_bytes or 0)


async def test_a_stopped_trainer_fills_the_streams_to_their_limits_and_no_further(
    tmp_path: Path, bus: Bus, bus_config: BusConfig, publisher: Publisher, closed_gate: None
) -> None:
    """Without admission only the sizes of the streams hold the line. It is held, and then everything is trained."""
    async with line(tmp_path, bus, publisher, *STORE, *LARGE) as run:
        rollout, reward = run.actors["rollout"].publisher, run.actors["reward"].publisher
        async with asyncio.timeout(20.0):
            while not (rollout.stats.waited_full and reward.stats.waited_full):
                await asyncio.sleep(0.02)
        for key in ("tasks", "episodes", "samples"):
            assert await size_bytes(bus, key) <= limit_bytes(bus, bus_config, key)  # type: ignore[arg-type]
        assert (await log.state(bus, "samples")).messages < 2 * ROWS
        ChainedWorld.gate.set()
        await run.done()
        made = await run.check(Counter((ordinal, 0) for ordinal in range(2 * ROWS)))
    assert (made.dropped, made.dead) == (0, 0)


async def test_a_log_smaller_than_the_way_to_the_next_checkpoint_does_not_lock_up(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Only a checkpoint lets samples go; when the log is full before one is due, one is made."""
    async with line(tmp_path, bus, publisher, *STORE, *LARGE, "trainer.checkpoint_every=1000") as run:
        await run.done()
        await run.check(Counter((ordinal, 0) for ordinal in range(2 * ROWS)))


async def test_a_full_ledger_is_named_and_not_waited_for(bus: Bus, publisher: Publisher) -> None:
    """Nothing trims the ledger: a trainer that waited would wait for ever."""
    await bus.api(
        f"STREAM.UPDATE.{names.stream(bus.run, 'ledger')}",
        {**(await bus.api(f"STREAM.INFO.{names.stream(bus.run, 'ledger')}"))["config"], "max_bytes": 300},
    )
    book = ledger.Ledger(bus, publisher, 0, 1)
    await book.append(RollbackRecord(old_epoch=0, new_epoch=1, fork=0))
    with pytest.raises(StreamFullError, match=r"the ledger is full after record 1 .*bus.max_store_bytes"):
        await book.append(RollbackRecord(old_epoch=1, new_epoch=2, fork=0))
    assert book.last_sequence == 1


async def test_ordered_mode_names_a_log_that_cannot_hold_a_batch(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """A smaller batch would be another run's result: both numbers are named instead."""
    ordered = ["trainer.ordered=true", "age.bound=0", "trainer.groups_per_batch=100", "age.admission=count"]
    with pytest.raises(ExceptionGroup) as caught:
        async with line(tmp_path, bus, publisher, *STORE, *LARGE, *ordered) as run:
            await run.done()
    assert caught.group_contains(UnrecoverableError, match=r"complete groups, a batch needs 100 .*max_store_bytes is")


async def test_a_slow_sibling_behind_a_full_log_does_not_lock_up(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Its sibling keeps the log from being trimmed, so the log fills, and the slow one could never be stored: the group
    is closed without it, as at a deadline, and the slow one is late."""
    slow = ["source.args.habits.0=second-waits", f"rollout.args.folder={tmp_path}", "trainer.checkpoint_every=1"]
    async with line(tmp_path, bus, publisher, *STORE, *LARGE, *slow) as run:
        reward = run.actors["reward"].publisher
        async with asyncio.timeout(20.0):
            while not reward.stats.waited_full:
                await asyncio.sleep(0.02)
        (tmp_path / "go").touch()
        await run.done()
        made = await run.check(Counter((ordinal, 0) for ordinal in range(2 * ROWS) if ordinal != 1))
    assert made.dropped_by_reason == {"late": 1}
