"""Rewards that compare the members of a group: the one reward process that leads gathers them and has them scored together.

    EPISODES --lease, held--> gathered by group --complete, or too long--> hook process: one value per member
                                                     | fails: every member has another try
                                                     +-> SAMPLES, each acknowledged after its own receipt

Invariant: as for single executions, one leaves EPISODES only after its scored form is stored, or buried with its reason.
There is one owner for all groups (lease `group-rewards`): whoever leases a member must get the others too. Members are held
until their group is complete, however many that are: what is under way is bounded by admission, and by the stream's size.
A leader that ends gives all of them back; the next one gathers them anew. A group is complete with `groups.enough` of its
members, and waits no longer than `groups.deadline_s` after the first or `reward.group.wait_s` after the last. Each execution's
header says with how many it was compared, so the trainer closes the group with exactly these: what comes later was
compared with nobody, goes on as it is, and is dropped(uncompared) there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from physarum.actors.errors import BadHookResultError, HookFailedError
from physarum.actors.leadership import leading
from physarum.actors.leasing import lease
from physarum.actors.reward.gathering import Gathered, Gathering
from physarum.actors.reward.judges import engines_file
from physarum.actors.reward.pool import Pool
from physarum.actors.reward.scorer import group_scorer_of, judges_token, limits_of
from physarum.actors.reward.values import apply_reward
from physarum.bus.codec import encode
from physarum.bus.records import Execution
from physarum.bus.work import Delivery, WorkQueue

if TYPE_CHECKING:
    from physarum.actors.reward.actor import RewardActor

_log = logging.getLogger(__name__)

LEASE: Final = "group-rewards"
_BATCH: Final = 64


@dataclass(slots=True, eq=False)
class Member:
    """An execution that waits for its group; `body` is its wire form, with the reward of its own where it has one."""

    delivery: Delivery
    execution: Execution
    body: bytes


class GroupWork:
    """The training executions of a run whose reward is the group's."""

    def __init__(self, actor: RewardActor, queue: str) -> None:
        assert actor.config.reward.group is not None  # asked by the actor
        self._actor, self._queue, self._group = actor, queue, actor.config.reward.group
        self._gathering: Gathering[Member] = Gathering(actor.config.groups.enough)
        self._clocks: dict[str, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        """Leads once nobody else does, until draining."""
        context, reward = self._actor.context, self._actor.config.reward
        token_env = judges_token(self._actor.config)
        scorer = group_scorer_of(self._group, reward.workers, context.folder, engines_file(context), token_env)
        async with leading(context, LEASE) as lease:
            if lease is None:
                return
            pool = Pool(scorer.hook, scorer.args, reward.workers, limits_of(reward, self._group))
            async with pool.open(), self._actor.queue(self._queue).open() as queue, asyncio.TaskGroup() as tasks:
                await self._gather(queue, pool, tasks)

    async def _gather(self, queue: WorkQueue, pool: Pool, tasks: asyncio.TaskGroup) -> None:
        """Leases all there is, until draining; the task group then waits for what is being scored."""
        context = self._actor.context
        try:
            while not context.draining.is_set():
                for delivery in await lease(context, queue, _BATCH):
                    tasks.create_task(self._one(delivery, pool, tasks), name=f"member {delivery.sequence}")
        finally:
            for clock in self._clocks.values():
                clock.cancel()

    async def _one(self, delivery: Delivery, pool: Pool, tasks: asyncio.TaskGroup) -> None:
        opened = await self._actor.opened(delivery)
        if opened is None or not await self._actor.scored(delivery, *opened):
            return
        execution, body = opened
        task = execution.task
        if self._gathering.is_settled(task.group):
            await self._actor.publish(delivery, "samples", execution, compared=0)
            return
        own = encode(execution) if self._actor.config.reward.scores else body
        group = self._gathering.add(task, Member(delivery, execution, own), asyncio.get_running_loop().time())
        self._actor.numbers["waiting"] = self._gathering.waiting
        if group is not None:
            self._stop_clock(task.group)
            await self._score(task.group, group, pool, tasks)
        else:
            self._start_clock(task.group, pool, tasks)

    def _stop_clock(self, name: str) -> None:
        if (clock := self._clocks.pop(name, None)) is not None:
            clock.cancel()

    def _start_clock(self, name: str, pool: Pool, tasks: asyncio.TaskGroup) -> None:
        """Anew: it runs out at the group's deadline, or when nobody else came for long."""
        self._stop_clock(name)
        if self._actor.context.draining.is_set():
            return
        loop, deadline_s = asyncio.get_running_loop(), self._actor.config.groups.deadline_s
        ends_at = loop.time() + self._group.wait_s
        if deadline_s is not None:
            ends_at = min(ends_at, self._gathering.waits_since(name) + deadline_s)
        self._clocks[name] = loop.call_at(ends_at, self._stop_waiting, name, pool, tasks)

    def _stop_waiting(self, name: str, pool: Pool, tasks: asyncio.TaskGroup) -> None:
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
            tasks.create_task(self._score(name, group, pool, tasks), name=f"group {name}")

    async def _score(self, name: str, group: Gathered[Member], pool: Pool, tasks: asyncio.TaskGroup) -> None:
        compared, doubles = group.compared, list(group.doubles)
        try:
            values = _checked(await self._actor.judged(pool, *(member.body for member in compared)), len(compared))
            pairs = [*zip(compared, values, strict=True), *((member, values[place]) for place, member in doubles)]
            for member, value in pairs:
                apply_reward(member.execution, value, self._actor.config.reward.weights)
        except (HookFailedError, BadHookResultError) as error:
            for member in (*compared, *(member for _, member in doubles)):
                await self._actor.fail(member.delivery, error, f"group {name}: ")
            if self._gathering.failed(name):
                self._start_clock(name, pool, tasks)
            return
        for member, _ in pairs:
            await self._actor.publish(member.delivery, "samples", member.execution, len(compared))
        for member in self._gathering.settle(name):
            await self._actor.publish(member.delivery, "samples", member.execution, compared=0)


def _checked(values: Any, members: int) -> Sequence[Any]:
    if not isinstance(values, list) or len(values) != members:
        raise BadHookResultError(
            f"the group reward hook returned {values!r:.80} for {members} executions; expected a list with one reward for each"
        )
    return values
