"""Which partitions of the groups a reward process owns, of those that are there.

Rendezvous hashing (Thaler, Ravishankar 1996): each partition belongs to the process with the highest hash of both names, so who
joins or leaves moves only its own. Presence tells who is there, and to each at its own moment; the lease of a partition keeps
two from owning it meanwhile. Who is cordoned, or drains, owns nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import xxhash

from physarum.actors.context import Context
from physarum.actors.policy_engines import READY
from physarum.bus.presence import Roster


def owner_of(partition: int | None, instances: Iterable[str]) -> str:
    """The one of `instances` (at least one) that owns a partition."""
    return max(instances, key=lambda one: (xxhash.xxh3_64_intdigest(f"{partition}/{one}".encode()), one))


class Shares:
    """Of one process: `mine` and `lost` of a partition are set while it is to own it, or not."""

    def __init__(self, me: str, partitions: Iterable[int | None]) -> None:
        self._me = me
        self.mine = {partition: asyncio.Event() for partition in partitions}
        self.lost = {partition: asyncio.Event() for partition in self.mine}

    def follow(self, instances: Iterable[str]) -> None:
        """Those that are there now, this process among them unless it owns nothing."""
        there = set(instances)
        for partition, mine in self.mine.items():
            other = self.lost[partition]
            owned = bool(there) and owner_of(partition, there) == self._me
            (mine if owned else other).set()
            (other if owned else mine).clear()


@asynccontextmanager
async def shares_followed(context: Context) -> AsyncIterator[Shares]:
    """Kept up to date while the block runs."""
    me = context.identity.instance
    shares = Shares(me, context.config.reward.partitions)

    def look() -> None:
        others = {beat.instance for beat in roster.members if beat.state == READY} - {me}
        shares.follow(others if context.paused else others | {me})

    roster = Roster(context.bus, "reward", on_change=look)
    async with roster.open():
        look()
        yield shares
