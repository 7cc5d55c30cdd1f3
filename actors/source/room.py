"""Room for one more group, as one policy has it: what is out by its own ledger, against its own bound, batch and engines.

A group is issued when every policy has room, so a task holds its place until every policy is done with it. Invariant: no
policy is held up for ever by another: one that has no room has a whole batch of its own out, which it will train.
"""

from __future__ import annotations

from collections.abc import Callable

from physarum.actors.policy_engines import policy_group, served_versions
from physarum.actors.source.admission import Sizes, admitted, has_room
from physarum.actors.source.followers import Followers
from physarum.actors.source.pace import Pace
from physarum.bus.presence import Roster
from physarum.bus.version import Version
from physarum.configs.root import RootConfig

Engines = Callable[[], Roster | None]
"""The engines of the run; None where there are none to look at."""


class Room:
    """`view`: the run as the policy sees it; `followers`: of its ledger."""

    def __init__(self, view: RootConfig, followers: Followers, engines: Engines) -> None:
        self._view, self._engines = view, engines
        self.followers = followers
        self.limit = admitted(view)
        age = view.age.of(view.source.name)
        paced = age.admission == "pace"
        self._pace = Pace(followers.clock, age.bound, view.trainer.groups_per_batch) if paced else None

    def begin(self, first: int) -> None:
        """Ordinals below `first` were issued before."""
        if self._pace is not None:
            self._pace.begin(first)

    def for_a_group(self, issued: int, sizes: Sizes) -> bool:
        """`issued`: tasks, refills included."""
        done, served = self.followers.disposals, self._served()
        if self._pace is not None:
            return self._pace.has_room(issued, done.dead_count, done.oldest_out, self._pace.base(served), sizes)
        unserved = self.followers.clock.unserved(served or (), self._view.trainer.publish_every)
        return has_room(issued, done.count, sizes, self.limit, unserved)

    def noting(self) -> Callable[[int], None]:
        """Ask before a group is stored: no engine serves less when its tasks are taken. Call with the ordinal behind it."""
        pace = self._pace
        if pace is None:
            return lambda through: None
        base = pace.base(self._served())
        return lambda through: pace.note(through, base)

    def _served(self) -> list[Version] | None:
        """By ready engines; None where there are none to look at."""
        engines = self._engines()
        return None if engines is None else served_versions(engines, policy_group(self._view))
