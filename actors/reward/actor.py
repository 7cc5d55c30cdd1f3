"""The reward actor: leases executions, has the hook score them, publishes them scored, then acknowledges.

    EPISODES --lease--> hook process --value, checked--> SAMPLES (training) or EVALS --receipt--> ack
                          | raises, hangs, dies, returns nonsense: another try, at last buried with its reason

Invariant: an execution leaves EPISODES only after its scored form is stored, or after it was buried with its reason.
A failing hook costs its own executions their tries and nobody else anything, and slow rewards of evaluations hold up no
training: each queue has room of its own. With `reward.group` the training executions go by groups instead (grouped.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, Final

from physarum.actors import eval_sets
from physarum.actors.context import Context
from physarum.actors.errors import BadHookResultError, HookFailedError
from physarum.actors.leasing import lease
from physarum.actors.reward.errors import HookTimeoutError, JudgesAwayError, ServiceUnavailableError
from physarum.actors.reward.family import lists_children
from physarum.actors.reward.grouped import GroupWork
from physarum.actors.reward.judges import Groups, Judges, Needs, engines_file, judges_followed
from physarum.actors.reward.pool import Pool
from physarum.actors.reward.room import Room
from physarum.actors.reward.scorer import check_sandbox, judges_token, limits_of, models_of, scorer_of
from physarum.actors.reward.values import apply_reward
from physarum.actors.runtime import Actor
from physarum.actors.waiting import unless_draining
from physarum.actors.wire import ExecutionStream, publish_scored, read_body
from physarum.bus.codec import decode
from physarum.bus.errors import BlobAlteredError, BlobMissingError, BlobRefusedError, CodecError
from physarum.bus.records import Execution
from physarum.bus.work import Delivery, WorkQueue

_log = logging.getLogger(__name__)

_QUEUES: Final[dict[str, ExecutionStream]] = {"episodes_train": "samples", "episodes_eval": "evals"}
"""The consumers of EPISODES and where their executions go."""
_TRAINING: Final = "episodes_train"


class RewardActor(Actor):
    """Role reward: `reward.workers` hook processes, `reward.concurrency` calls at once in each."""

    role: ClassVar[str] = "reward"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._judges: Judges | None = None
        self.needs = Needs(context.config.reward)
        self._pool: Pool | None = None
        self._own: dict[str, Pool] = {}
        self.numbers |= {"scored": 0, "failed": 0, "timeouts": 0}

    async def run(self) -> None:
        grouped = self.config.reward.group is not None
        async with AsyncExitStack() as stack:
            self._judges = await stack.enter_async_context(judges_followed(self.context))
            self._pool = await stack.enter_async_context(self._hook_processes())
            self._own = await self._pools_of_sets(stack)
            alone = [name for name in _QUEUES if not (grouped and name == _TRAINING)]
            queues = {name: await stack.enter_async_context(self.queue(name).open()) for name in alone}
            self.become("ready")
            async with asyncio.TaskGroup() as group:
                for name, queue in queues.items():
                    room = Room(self._pools_of(name))
                    group.create_task(self._work(queue, room, _QUEUES[name], group), name=name)
                if grouped:
                    group.create_task(GroupWork(self).run(), name="groups")

    @asynccontextmanager
    async def _hook_processes(self) -> AsyncIterator[Pool | None]:
        """None when nothing scores here: executions then pass through unscored."""
        reward = self.config.reward
        engines, token_env = engines_file(self.context), judges_token(self.config)
        scorer = scorer_of(reward, self.context.folder, engines, models_of(self.config), token_env)
        if scorer is None:
            yield None
            return
        await check_sandbox(reward)
        if not lists_children():
            _log.warning(
                "this kernel lists no children (/proc/PID/task/PID/children), so reward.children and reward.total_mib hold for"
                " a hook's own process alone, and what that starts in sessions of its own may outlive it; run this actor on a"
                " kernel with CONFIG_PROC_CHILDREN"
            )
        async with Pool(scorer.hook, scorer.args, reward.workers, limits_of(reward)).open() as pool:
            yield pool

    async def _pools_of_sets(self, stack: AsyncExitStack) -> dict[str, Pool]:
        """One process for each set of held-out problems that is judged by a hook of its own."""
        found: dict[str, Pool] = {}
        for name, part in eval_sets.sets_of(self.config).items():
            if part.reward is not None:
                pool = Pool(part.reward.hook, part.reward.args, 1, limits_of(self.config.reward))
                found[name] = await stack.enter_async_context(pool.open())
        return found

    def queue(self, durable: str) -> WorkQueue:
        bus = self.config.bus
        return WorkQueue(
            self.bus,
            self.publisher,
            "episodes",
            durable,
            worker=self.context.identity.instance,
            ack_wait_s=bus.ack_wait_s,
            max_deliver=bus.max_deliver,
            claims=self.context.claims,
        )

    def _pools_of(self, queue: str) -> list[Pool]:
        """Where its executions are scored."""
        shared = [] if self._pool is None else [self._pool]
        return shared if queue == _TRAINING else [*shared, *self._own.values()]

    async def _work(self, queue: WorkQueue, room: Room, target: ExecutionStream, group: asyncio.TaskGroup) -> None:
        """Leases what there is room for, until draining; the group then waits for what runs."""
        while not self.context.draining.is_set():
            free = await unless_draining(self.context, room.free())
            if free is None:
                return
            for delivery in await lease(self.context, queue, free):
                room.take(group.create_task(self._handle(delivery, target), name=f"reward {delivery.sequence}"))

    async def _handle(self, delivery: Delivery, target: ExecutionStream) -> None:
        opened = await self.opened(delivery)
        if opened is not None and await self.scored(delivery, *opened):
            await self.publish(delivery, target, opened[0])

    async def opened(self, delivery: Delivery) -> tuple[Execution, bytes] | None:
        """The execution and its wire form; None where it cannot be read, and the delivery has ended."""
        try:
            body = await read_body(self.context, delivery.headers, delivery.data)
            return decode(body, Execution), body
        except (CodecError, BlobAlteredError) as error:
            self.numbers["failed"] += 1
            await delivery.bury(f"unreadable execution: {error}")
        except (BlobMissingError, BlobRefusedError, OSError) as error:
            await self.fail(delivery, error, "its body cannot be read: ")
        return None

    async def scored(self, delivery: Delivery, execution: Execution, body: bytes) -> bool:
        """Whether the hook's value was given to `execution` (where there is a hook); else the delivery has ended."""
        pool = eval_sets.own(execution.task, self._own, self._pool)
        needed = self.needs.of(execution.task) if pool is self._pool else Groups()
        try:
            if pool is not None:
                value = await self.judged(pool, needed, body)
                apply_reward(execution, value, self.config.reward.weights)
        except (HookFailedError, BadHookResultError) as error:
            await self.fail(delivery, error)
            return False
        return True

    async def judged(self, pool: Pool, needed: Groups, *bodies: bytes) -> Any:
        """As `pool.score`, of a hook that asks the engines `needed`: while one group has none ready it is not called, and what
        fails meanwhile is called again, so that it is no failed try. Raises JudgesAwayError when draining begins before."""
        judges = self._judges
        assert judges is not None  # run() opened it
        while True:
            if not await unless_draining(self.context, _done(judges.ready(needed))):
                raise JudgesAwayError("no judge is ready, and the actor drains")
            before = judges.losses(needed)
            try:
                return await pool.score(*bodies)
            except (ServiceUnavailableError, HookTimeoutError):
                if judges.losses(needed) == before:
                    raise

    async def publish(
        self, delivery: Delivery, target: ExecutionStream, execution: Execution, compared: tuple[int, ...] | None = None
    ) -> None:
        """Stores the scored execution, then acknowledges the delivery. `compared`: as ExecutionHeader has it."""
        try:
            await publish_scored(self.context, target, execution, delivery.headers, delivery.data, compared)
        except CodecError as error:
            self.numbers["failed"] += 1
            await delivery.bury(f"a scored execution has no wire form: {error}")
            return
        await delivery.ack()
        self.numbers["scored"] += 1
        self.progressed()

    async def fail(self, delivery: Delivery, error: Exception, said: str = "") -> None:
        """Ends the delivery by another try, or for good when this was the last one; one that could not begin goes back."""
        if isinstance(error, JudgesAwayError):
            await delivery.give_back()
            return
        self.numbers["failed"] += 1
        self.numbers["timeouts"] += isinstance(error, HookTimeoutError)
        await delivery.retry(f"{said}{error}")


async def _done(work: Coroutine[Any, Any, None]) -> bool:
    """True, once `work` has ended."""
    await work
    return True
