"""Rewards that compare the members of a group: the reward process that owns them gathers them and has them scored together.

    EPISODES --lease, held--> gathered by group --complete, or too long--> hook process: one value per member
                                                     | fails: every member has another try
                                                     +-> SAMPLES, each acknowledged after its own receipt

Invariant: as for single executions, one leaves EPISODES only after its scored form is stored, or buried with its reason.
Whoever leases a member must get the others too: there is one owner for all groups (lease `group-rewards`), or with
`reward.group.partitions` one for each part of them (`group-rewards-3`; shares.py says whose it is). Members are held
until their group is complete, however many that are: what is under way is bounded by admission, and by the stream's size.
An owner that ends gives all of them back; the next one gathers them anew. A group is complete with `groups.enough` of its
members, and waits no longer than `groups.deadline_s` after the first or `reward.group.wait_s` after the last. Each execution's
header says with whom it was compared, so the trainer closes the group with exactly these: what comes later was compared with
nobody, goes on as it is, and is dropped(uncompared) there, as is what was compared anew because an owner died between two
members.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from physarum.actors.errors import BadHookResultError, HookFailedError
from physarum.actors.leadership import leading
from physarum.actors.leasing import lease
from physarum.actors.reward.gathering import Gathered, Gathering
from physarum.actors.reward.judges import engines_file
from physarum.actors.reward.pool import Pool
from physarum.actors.reward.scorer import group_scorer_of, judges_token, limits_of
from physarum.actors.reward.shares import Shares, shares_followed
from physarum.actors.reward.values import apply_reward
from physarum.actors.waiting import unless, unless_draining
from physarum.bus import names
from physarum.bus.codec import encode
from physarum.bus.records import Execution
from physarum.bus.work import Delivery, WorkQueue

if TYPE_CHECKING:
    from physarum.actors.reward.actor import RewardActor

_log = logging.getLogger(__name__)

LEASE: Final = "group-rewards"
_BATCH: Final = 64
_AGAIN_S: Final = 3.0
"""For members of a group whose comparison failed to come again, where others that came meanwhile are enough without them."""
_GRACE_S: Final = 0.2
"""A fetch that is receiving leases when a partition is given up ends within this."""


@dataclass(slots=True, eq=False)
class Member:
    """An execution that waits for its group; `body` is its wire form, with the reward of its own where it has one."""

    delivery: Delivery
    execution: Execution
    body: bytes


class GroupWork:
    """The training executions of a run whose reward is the group's, as far as this process owns them."""

    def __init__(self, actor: RewardActor) -> None:
        group = actor.config.reward.group
        assert group is not None  # asked by the actor
        self._actor, self._group = actor, group
        self._gatherers: set[Gatherer] = set()

    async def run(self) -> None:
        """Until draining."""
        context, partitions = self._actor.context, self._actor.config.reward.partitions
        if partitions == (None,):
            async with leading(context, LEASE) as lease:
                if lease is not None:
                    async with self._pool().open() as pool:
                        await self._gather(None, pool, context.draining)
            return
        async with self._pool().open() as pool, shares_followed(context) as shares, asyncio.TaskGroup() as tasks:
            for partition in partitions:
                tasks.create_task(self._share(partition, shares, pool), name=f"partition {partition}")

    async def _share(self, partition: int | None, shares: Shares, pool: Pool) -> None:
        """Owns a partition whenever it is this process's."""
        context = self._actor.context
        while not context.draining.is_set():
            if await unless_draining(context, shares.mine[partition].wait()) is None:
                return
            async with leading(context, f"{LEASE}-{partition}") as lease:  # once its owner before has let it go
                if lease is not None:
                    await self._gather(partition, pool, shares.lost[partition])

    async def _gather(self, partition: int | None, pool: Pool, over: asyncio.Event) -> None:
        gatherer = Gatherer(self._actor, pool, self._note)
        self._gatherers.add(gatherer)
        try:
            await gatherer.run(f"episodes_{names.training(partition)}", over)
        finally:
            self._gatherers.discard(gatherer)
            self._note()

    def _note(self) -> None:
        self._actor.numbers["waiting"] = sum(one.waiting for one in self._gatherers)

    def _pool(self) -> Pool:
        """Of this process; where several share the partitions each gets its part of what the run may ask of a service."""
        context, reward = self._actor.context, self._actor.config.reward
        workers = reward.workers if reward.partitions == (None,) else reward.processes
        token_env = judges_token(self._actor.config)
        scorer = group_scorer_of(self._group, workers, context.folder, engines_file(context), token_env)
        return Pool(scorer.hook, scorer.args, reward.workers, limits_of(reward, self._group))


class Gatherer:
    """One partition, while this process owns it."""

    def __init__(self, actor: RewardActor, pool: Pool, note: Callable[[], None]) -> None:
        """`note` is called when `waiting` has changed."""
        assert actor.config.reward.group is not None  # asked by the actor
        self._actor, self._pool, self._note = actor, pool, note
        self._group = actor.config.reward.group
        self._gathering: Gathering[Member] = Gathering(actor.config.groups.enough)
        self._clocks: dict[str, asyncio.TimerHandle] = {}
        self._over = asyncio.Event()

    @property
    def waiting(self) -> int:
        return self._gathering.waiting

    async def run(self, queue: str, over: asyncio.Event) -> None:
        """Leases all there is, until draining or `over`; what is being scored then is waited for, and the rest given back."""
        self._over = over
        async with self._actor.queue(queue).open() as opened, asyncio.TaskGroup() as tasks:
            try:
                await self._lease_all(opened, tasks)
            finally:
                for clock in self._clocks.values():
                    clock.cancel()

    async def _lease_all(self, queue: WorkQueue, tasks: asyncio.TaskGroup) -> None:
        context = self._actor.context
        while not (context.draining.is_set() or self._over.is_set()):
            for delivery in await unless(self._over, lease(context, queue, _BATCH), _GRACE_S) or []:
                tasks.create_task(self._one(delivery, tasks), name=f"member {delivery.sequence}")

    async def _one(self, delivery: Delivery, tasks: asyncio.TaskGroup) -> None:
        opened = await self._actor.opened(delivery)
        if opened is None or not await self._actor.scored(delivery, *opened):
            return
        execution, body = opened
        task = execution.task
        if self._gathering.is_settled(task.group):
            await self._actor.publish(delivery, "samples", execution, compared=())
            return
        own = encode(execution) if self._actor.config.reward.scores else body
        group = self._gathering.add(task, Member(delivery, execution, own), asyncio.get_running_loop().time())
        self._note()
        if group is not None:
            self._stop_clock(task.group)
            await self._score(task.group, group, tasks)
        else:
            self._start_clock(task.group, tasks)

    def _stop_clock(self, name: str) -> None:
        if (clock := self._clocks.pop(name, None)) is not None:
            clock.cancel()

    def _start_clock(self, name: str, tasks: asyncio.TaskGroup, wait_s: float | None = None) -> None:
        """Anew: it runs out at the group's deadline, or when nobody else came for `wait_s` (None: as configured)."""
        self._stop_clock(name)
        if self._actor.context.draining.is_set() or self._over.is_set():
            return
        loop, deadline_s = asyncio.get_running_loop(), self._actor.config.groups.deadline_s
        ends_at = loop.time() + (self._group.wait_s if wait_s is None else min(wait_s, self._group.wait_s))
        if deadline_s is not None:
            ends_at = min(ends_at, self._gathering.waits_since(name) + deadline_s)
        self._clocks[name] = loop.call_at(ends_at, self._stop_waiting, name, tasks)

    def _stop_waiting(self, name: str, tasks: asyncio.TaskGroup) -> None:
        self._clocks.pop(name, None)
        group = self._gathering.take(name)
        if group is not None:
            _log.warning(
                "group %s is scored with %d of %d members: no other came within groups.deadline_s, or for"
                " reward.group.wait_s = %g s",
                name,
                len(group.members),
                group.size,
                self._group.wait_s,
            )
            tasks.create_task(self._score(name, group, tasks), name=f"group {name}")

    async def _score(self, name: str, group: Gathered[Member], tasks: asyncio.TaskGroup) -> None:
        compared, doubles = group.compared, list(group.doubles)
        try:
            values = _checked(
                await self._actor.judged(self._pool, self._actor.needs.of_group, *(member.body for member in compared)),
                len(compared),
            )
            pairs = [*zip(compared, values, strict=True), *((member, values[place]) for place, member in doubles)]
            for member, value in pairs:
                apply_reward(member.execution, value, self._actor.config.reward.weights)
        except (HookFailedError, BadHookResultError) as error:
            for member in (*compared, *(member for _, member in doubles)):
                await self._actor.fail(member.delivery, error, f"group {name}: ")
            if self._gathering.failed(name):
                self._start_clock(name, tasks, _AGAIN_S if self._gathering.has_enough(name) else None)
            return
        together = tuple(sorted(group.members))
        async with asyncio.TaskGroup() as publishing:  # at once: who dies in between leaves a group in two comparisons
            for member, _ in pairs:
                publishing.create_task(self._actor.publish(member.delivery, "samples", member.execution, together))
        for member in self._gathering.settle(name):
            await self._actor.publish(member.delivery, "samples", member.execution, compared=())


def _checked(values: Any, members: int) -> Sequence[Any]:
    if not isinstance(values, list) or len(values) != members:
        raise BadHookResultError(
            f"the group reward hook returned {values!r:.80} for {members} executions; expected a list with one reward for each"
        )
    return values
