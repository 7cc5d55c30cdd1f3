"""Samples above the inline limit on their way from a machine without the run's folder into the trainer of another one."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest
from actor_fixture import running
from aiohttp import web
from blob_fixture import TOKEN, TOKEN_ENV, announced_store
from fault_line import KINDS, check, context, finished, prepare

from physarum.bus import log
from physarum.bus.connection import Bus
from physarum.bus.names import BLOB_HEADER
from physarum.bus.publisher import Publisher

pytestmark = pytest.mark.timeout(180)

PADDING = 70_000
"""int32 tokens: 280 kB, above the 256 KiB that a message may have."""


async def test_large_samples_reach_the_trainer_over_http_through_failing_servers(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout and reward on one machine, source and trainer on the other; every third request fails. Each execution is
    trained exactly once, from the bytes that were sent."""
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    overrides = [f"rollout.args.padding={PADDING}", f"checkpoint.token_env={TOKEN_ENV}", "blobs.cache_bytes=0"]
    overrides += [f"trainer.tokens_per_microbatch={2 * PADDING}"]
    overrides += ["bus.ack_wait_s=60", "bus.max_deliver=50"]  # nobody dies: a busy machine must not look like a death
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    here = prepare(tmp_path / "here", bus.run, *overrides)
    there = prepare(tmp_path / "there", bus.run, *overrides)
    dice = random.Random(3)

    def fails(request: web.Request) -> web.StreamResponse | None:
        if dice.random() > 1 / 3:
            return None
        if dice.random() < 1 / 2 and request.transport is not None:
            request.transport.abort()
        return web.Response(status=503, text="busy")

    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(announced_store(here.path, bus, publisher))
        store.before = fails
        for role, folder in (("source", here), ("rollout", there), ("reward", there), ("trainer", here)):
            own = await Publisher(bus).start()
            await stack.enter_async_context(running(KINDS[role](context(folder, bus, own, role))))
        await finished(bus, publisher, 100.0)
        made = await check(bus, here, Counter((ordinal, 0) for ordinal in range(40)))
        kept = await log.scan(bus, "samples")
    assert (made.dropped, made.dead, made.in_flight) == (0, 0, 0)
    assert all(BLOB_HEADER in entry.headers and not entry.data for entry in kept)
    assert store.count("PUT") >= 40, "each body is stored once, scored or not"
    assert store.count("GET") >= 40, "the reward reads each"
    assert not (there.path / "blobs").exists()
