"""The reward actor: leases executions, has the hook score them, publishes them scored, then acknowledges.

    EPISODES --lease--> hook process --value, checked--> SAMPLES (training) or EVALS --receipt--> ack
                          | raises, hangs, dies, returns nonsense: another try, at last buried with its reason

Invariant: an execution leaves EPISODES only after its scored form is stored, or after it was buried with its reason.
A failing hook costs its own executions their tries and nobody else anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import ClassVar, Final

from physarum.actors.context import Context
from physarum.actors.errors import BadHookResultError, HookFailedError
from physarum.actors.reward.errors import HookTimeoutError
from physarum.actors.reward.frames import Limits
from physarum.actors.reward.pool import Pool
from physarum.actors.reward.scorer import check_sandbox, scorer_of
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
_PASSING: Final = 64
"""Executions under way at once when no hook is configured."""
_DRAIN_GRACE_S: Final = 0.2
"""A fetch that is receiving leases when draining begins ends within this; one that waits is cancelled."""


class RewardActor(Actor):
    """Role reward: `reward.workers` hook processes, `reward.concurrency` calls at once in each."""

    role: ClassVar[str] = "reward"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._running: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._pool: Pool | None = None
        self.numbers |= {"scored": 0, "failed": 0, "timeouts": 0}

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            self._pool = await stack.enter_async_context(self._hook_processes())
            queues = {name: await stack.enter_async_context(self._queue(name).open()) for name in _QUEUES}
            self.become("ready")
            async with asyncio.TaskGroup() as group:
                for name, queue in queues.items():
                    group.create_task(self._work(queue, _QUEUES[name], group), name=name)

    @asynccontextmanager
    async def _hook_processes(self) -> AsyncIterator[Pool | None]:
        """None when nothing scores here: executions then pass through unscored."""
        reward = self.config.reward
        scorer = scorer_of(reward, self.context.folder)
        if scorer is None:
            yield None
            return
        await check_sandbox(reward)
        memory = reward.memory_mib << 20 if reward.memory_mib is not None else None
        limits = Limits(timeout_s=reward.timeout_s, concurrency=reward.concurrency, memory_bytes=memory)
        async with Pool(scorer.hook, scorer.args, reward.workers, limits).open() as pool:
            yield pool

    def _queue(self, durable: str) -> WorkQueue:
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

    async def _work(self, queue: WorkQueue, target: ExecutionStream, group: asyncio.TaskGroup) -> None:
        """Leases what there is room for, until draining; the group then waits for what runs."""
        while not self.context.draining.is_set():
            await self.context.resumed.wait()
            room = await unless_draining(self.context, self._room())
            if room is None:
                return
            fetch = queue.fetch(room, self.config.bus.fetch_timeout_s)
            for delivery in await unless_draining(self.context, fetch, _DRAIN_GRACE_S) or []:
                task = group.create_task(self._handle(delivery, target), name=f"reward {delivery.sequence}")
                self._running.add(task)
                task.add_done_callback(self._free)

    async def _room(self) -> int:
        """Waits until another execution may be leased; how many may."""
        while (room := self._capacity() - len(self._running)) <= 0:
            self._freed.clear()
            await self._freed.wait()
        return room

    def _capacity(self) -> int:
        """Twice what the hook processes hold, so that none of them waits while scored executions are published."""
        return _PASSING if self._pool is None else 2 * self._pool.capacity

    def _free(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._freed.set()

    async def _handle(self, delivery: Delivery, target: ExecutionStream) -> None:
        try:
            body = await read_body(self.context, delivery.headers, delivery.data)
            execution = decode(body, Execution)
        except (CodecError, BlobAlteredError) as error:
            self.numbers["failed"] += 1
            await delivery.bury(f"unreadable execution: {error}")
            return
        except (BlobMissingError, BlobRefusedError, OSError) as error:
            await self._fail(delivery, f"its body cannot be read: {error}")
            return
        try:
            await self._score(execution, body)
        except (HookFailedError, BadHookResultError) as error:
            self.numbers["timeouts"] += isinstance(error, HookTimeoutError)
            await self._fail(delivery, str(error))
            return
        await self._publish(delivery, target, execution)

    async def _publish(self, delivery: Delivery, target: ExecutionStream, execution: Execution) -> None:
        try:
            await publish_scored(self.context, target, execution, delivery.headers, delivery.data)
        except CodecError as error:
            self.numbers["failed"] += 1
            await delivery.bury(f"a scored execution has no wire form: {error}")
            return
        await delivery.ack()
        self.numbers["scored"] += 1
        self.progressed()

    async def _score(self, execution: Execution, body: bytes) -> None:
        if self._pool is not None:
            apply_reward(execution, await self._pool.score(body), self.config.reward.weights)

    async def _fail(self, delivery: Delivery, reason: str) -> None:
        self.numbers["failed"] += 1
        await delivery.retry(reason)
