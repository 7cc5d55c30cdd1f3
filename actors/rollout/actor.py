"""The rollout actor: leases tasks, runs the generate hook, publishes the execution, then acknowledges the task.

    TASKS --lease--> slot --generate(task, client)--> Execution --publish, receipt--> EPISODES --then--> ack
                      |  raises, times out, returns nonsense: returned for another try, at last buried with its reason
                      |  cannot be stored (disk full, bus refuses): the actor ends by name; nothing of it is lost
                      +- killed: the lease ends, somebody else gets the task

Invariant: a task leaves TASKS only after its execution is stored, or after it was buried with its reason.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any, ClassVar, Final

import msgspec
import numpy as np

from physarum.actors import eval_sets
from physarum.actors.context import Context
from physarum.actors.errors import BadHookResultError, UnrecoverableError
from physarum.actors.policies import named
from physarum.actors.rollout.client import open_clients
from physarum.actors.rollout.cutting import CutOffError
from physarum.actors.rollout.environments import numbers_of, open_environments
from physarum.actors.rollout.in_flight import InFlight
from physarum.actors.rollout.live_sampling import follow_sampling, read_sampling
from physarum.actors.rollout.router import DEMAND, PresenceRouter
from physarum.actors.rollout.surplus import Surplus, SurplusError
from physarum.actors.rollout.tasks import TaskQueue
from physarum.actors.runtime import Actor
from physarum.actors.wire import publish_execution, publish_partial, read_task
from physarum.agents.client import EngineClient
from physarum.agents.contained import contained
from physarum.agents.environments.pool import EnvironmentPool
from physarum.agents.errors import AgentError, EngineRefusedError, TaskError
from physarum.agents.fleet.fair import announced
from physarum.agents.protocols import Client
from physarum.bus.codec import decode
from physarum.bus.errors import BlobRefusedError, BlobUnreachableError, BusError, CodecError, RecordError
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import model_of
from physarum.bus.work import Delivery
from physarum.configs.hooks import Hook, load_hook
from physarum.configs.root import RootConfig
from physarum.configs.types import Arguments

_log = logging.getLogger(__name__)

_REPORT_S: Final = 1.0
_HAND_OVER_S: Final = 10.0
"""For storing what a drained episode generated; the supervisor kills an actor that drains much longer."""

_BAD_REQUEST: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""What an engine says of the request itself. Other statuses may say something of the server."""

GenerateHook = Callable[..., Awaitable[list[Sample]]]


class RolloutActor(Actor):
    """Role rollout: `rollout.slots` episodes at once."""

    role: ClassVar[str] = "rollout"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.tally = _tally()
        self._router: PresenceRouter
        self._evaluating_router: PresenceRouter
        self._other_routers: dict[str, PresenceRouter] = {}
        self._environments: Mapping[str, EnvironmentPool] = {}

    async def run(self) -> None:
        hook = self.config.rollout.generate
        if hook is None:
            raise UnrecoverableError("rollout.generate is not set; name the hook that runs an episode")
        hooks = Hooks(self.config, hook)
        async with AsyncExitStack() as stack:
            clients = await stack.enter_async_context(open_clients(self.context))
            client, evaluating, self._router, self._evaluating_router, self._other_routers = clients
            self._environments = await stack.enter_async_context(open_environments(self.context))
            client.environments = evaluating.environments = self._environments
            queue = await stack.enter_async_context(TaskQueue(self.context, slots=self.config.rollout.slots).open())
            reporter = asyncio.create_task(self._report(client), name="generation report")
            stack.callback(reporter.cancel)
            in_flight, surplus = InFlight(self.context), Surplus(self.context)
            if in_flight.wanted:
                _beside(stack, in_flight.follow(), "follow the head")
            if surplus.wanted:
                _beside(stack, surplus.follow(), "follow closed groups")
            await read_sampling(self, client.live)
            _beside(stack, follow_sampling(self, client.live), "follow the sampling")
            self.become("ready")
            await self._work(queue, Episodes(self, client, evaluating, hooks, in_flight, surplus))
            await self._emit_report(client)

    async def _work(self, queue: TaskQueue, episodes: Episodes) -> None:
        """Keeps every slot busy until draining; then waits for the episodes that run.

        What an episode itself does wrong ends its try; an error beyond that ends the actor, by name: an episode whose
        task nobody ends would hold its lease for ever.
        """
        running: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            self.numbers["running"] = len(running)
            queue.free()

        async with asyncio.TaskGroup() as group:
            while not self.context.draining.is_set():
                if self.context.paused:
                    await queue.rest(self.context.resumed)
                delivery = await queue.next(self.context.halted)
                if delivery is None:
                    continue
                task = group.create_task(episodes.one(delivery), name=f"episode {delivery.sequence}")
                running.add(task)
                task.add_done_callback(ended)
                self.numbers["running"] = len(running)
            await queue.stop()
            if running:
                _, unfinished = await asyncio.wait(running, timeout=self.config.supervisor.drain_timeout_s / 2)
                for task in unfinished:
                    task.cancel()

    async def _report(self, client: EngineClient) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            await self._emit_report(client)

    def _ask_for(self, demand: int, policy: str = "") -> None:
        """Tells the others what this worker asks of a policy's engines, at once where it is another magnitude: shares
        follow it."""
        fact = named(DEMAND, policy)
        before = self.facts.get(fact, 0)
        self.facts = {**self.facts, fact: announced(before, demand)}
        if not before / 2 <= demand <= before * 2:
            self.announce()

    async def _emit_report(self, client: EngineClient) -> None:
        intervals = [list(interval) for interval in client.meter.pop()]
        tally, self.tally = self.tally, _tally()
        replay = client.replay.pop()
        for name in ("interrupted", "replayed"):
            self.numbers[name] = self.numbers.get(name, 0) + sum(getattr(one, name) for one in replay.values())
        waiting = self._router.waiting + sum(router.waiting for router in self._other_routers.values())
        self.numbers |= {"in_flight": client.meter.in_flight, "waiting": waiting}
        self.numbers |= {f"flaw_{name}": count for name, count in client.flaws.items()}
        if self._evaluating_router is not self._router:
            self.numbers["evaluating_waiting"] = self._evaluating_router.waiting
        self.numbers |= numbers_of(self._environments)
        for policy, router in {"": self._router, **self._other_routers}.items():
            self._ask_for(router.pop_demand(), policy)
        if intervals or replay or any(tally.values()):
            told = msgspec.to_builtins(replay)
            await self.context.emit("generation", {**tally, "intervals": intervals, "replay": told})


def _beside(stack: AsyncExitStack, work: Coroutine[Any, Any, None], name: str) -> None:
    """Work whose end costs no execution: it is logged."""
    task = asyncio.create_task(work, name=name)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: ended, what it would have told is not known here any more: %r", name, error)

    task.add_done_callback(ended)
    stack.callback(task.cancel)


def _tally() -> dict[str, int]:
    return {"tokens": 0, "prompt_tokens": 0, "episodes": 0, "failed": 0, "hopeless": 0, "late": 0, "handed_over": 0}


class Hooks:
    """The run's generate hook, and those that sets of problems have of their own."""

    def __init__(self, config: RootConfig, hook: Hook) -> None:
        self._common = self._loaded(hook, config.rollout.args)
        own = {name: part.generate for name, part in eval_sets.sets_of(config).items() if part.generate is not None}
        self._own = {name: self._loaded(one.hook, one.args) for name, one in own.items()}

    def run(self, task: Task, client: Client) -> Awaitable[list[Sample]]:
        return eval_sets.own(task, self._own, self._common)(task, client)

    @staticmethod
    def _loaded(hook: Hook, args: Arguments) -> GenerateHook:
        return functools.partial(load_hook(hook), **args)  # type: ignore[arg-type]  # checked where it was configured


class Episodes:
    """Runs deliveries to their end; every path ends the delivery exactly once."""

    def __init__(
        self,
        actor: RolloutActor,
        client: EngineClient,
        evaluating: EngineClient,
        hooks: Hooks,
        in_flight: InFlight,
        surplus: Surplus,
    ) -> None:
        self._actor = actor
        self._client, self._evaluating = client, evaluating
        self._hooks = hooks
        self._in_flight = in_flight
        self._surplus = surplus
        self._config = actor.config.rollout

    async def one(self, delivery: Delivery) -> None:
        try:
            task = await self._read(delivery)
        except CodecError as error:
            await delivery.bury(f"unreadable task: {error}")
            return
        if task is None:
            return
        base = self._evaluating if task.task_class == "eval" else self._client
        started_at, client = time.time(), base.for_task(task)
        try:
            samples = await self._run(task, client)
        except asyncio.CancelledError:
            # Draining: another worker takes the task, and goes on with what was generated here.
            await self._hand_over(delivery, task, client)
            raise
        except TimeoutError as error:
            if client.clock.ran_out:
                limit_s = self._config.episode_timeout_s
                await self._fail(delivery, f"episode exceeded rollout.episode_timeout_s = {limit_s:g} s")
            else:
                await self._raised(delivery, task, error)
        except CutOffError as error:
            await self._cut_off(delivery, task, started_at, error)
        except TaskError as error:
            await self._bury(delivery, error)
        except EngineRefusedError as error:
            refused = _refuses_prompt(error, client)
            await (self._bury(delivery, error) if refused else self._fail(delivery, f"{error}{_changed(client)}"))
        except (AgentError, RecordError, BadHookResultError) as error:
            await self._fail(delivery, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - a user's hook may raise anything; it ends this try, by name
            await self._raised(delivery, task, error)
        else:
            await self._publish(delivery, task, samples, started_at)

    async def _raised(self, delivery: Delivery, task: Task, error: Exception) -> None:
        """The hook's own error; call it where that is handled, for its traceback."""
        _log.exception("task %s: the generate hook raised", task.id)
        await self._fail(delivery, f"the generate hook raised {type(error).__name__}: {error}")

    async def _read(self, delivery: Delivery) -> Task | None:
        """None: what was generated before cannot be read now, and the delivery is returned; the last try begins anew."""
        try:
            return await read_task(self._actor.context, delivery.headers, delivery.data)
        except (BlobUnreachableError, BlobRefusedError, OSError) as error:
            if delivery.deliveries < self._actor.config.bus.max_deliver:
                await self._fail(delivery, f"what it had generated cannot be read: {error}")
                return None
            task = decode(delivery.data, Task)
            _log.warning("task %s begins again, what it had generated cannot be read: %s", task.id, error)
            return task

    async def _hand_over(self, delivery: Delivery, task: Task, client: EngineClient) -> None:
        """The partial is stored before the task is acknowledged: a death in between costs a second execution at most."""
        begun = client.journal.begun() if client.journal is not None else []
        if not begun or task.task_class == "eval":
            await delivery.give_back()
            return
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                await publish_partial(self._actor.context, task, begun)
        except (BusError, OSError, TimeoutError) as error:
            _log.warning("task %s is given back without what it generated: %r", task.id, error)
            await delivery.give_back()
            return
        await delivery.ack()
        self._actor.tally["handed_over"] += 1

    async def _run(self, task: Task, client: EngineClient) -> list[Sample]:
        def generate(client: Client) -> Awaitable[list[Sample]]:
            return contained(self._hooks.run(task, client))

        async with client.clock.limit(self._config.episode_timeout_s):
            samples = _checked(await self._surplus.run(task, lambda: self._in_flight.run(task, client, generate)))
        config = self._actor.config
        if config.policies:
            _check_policies(samples, (config.model.name, *config.policies))
        return samples

    async def _cut_off(self, delivery: Delivery, task: Task, started_at: float, error: CutOffError) -> None:
        """Tells the trainer that the task ends here, past the reward: there is nothing to score."""
        _log.info("task %s is cut off: %s", task.id, error)
        await publish_execution(
            self._actor.context, "samples", self._execution(delivery, task, [_nothing()], started_at)
        )
        await delivery.ack()
        self._actor.tally["late" if isinstance(error, SurplusError) else "hopeless"] += 1
        self._actor.progressed()

    def _execution(self, delivery: Delivery, task: Task, samples: list[Sample], started_at: float) -> Execution:
        return Execution(
            id=f"{task.id}:{uuid.uuid4().hex[:12]}",
            task=msgspec.structs.replace(task, begun=[]),
            samples=samples,
            worker=self._actor.context.identity.instance,
            started_at=started_at,
            finished_at=time.time(),
            delivery=delivery.deliveries,
        )

    async def _publish(self, delivery: Delivery, task: Task, samples: list[Sample], started_at: float) -> None:
        try:
            execution = self._execution(delivery, task, samples, started_at)
        except RecordError as error:
            await self._fail(delivery, f"the generate hook returned no valid execution: {error}")
            return
        try:
            await publish_execution(self._actor.context, "episodes", execution)
        except CodecError as error:
            await self._fail(delivery, f"what the generate hook returned has no wire form: {error}")
            return
        await delivery.ack()
        self._count(execution)

    async def _bury(self, delivery: Delivery, error: AgentError) -> None:
        """Another try would end the same: nobody asks for one."""
        self._actor.tally["failed"] += 1
        await delivery.bury(f"{type(error).__name__}: {error}", final=True)

    async def _fail(self, delivery: Delivery, reason: str) -> None:
        self._actor.tally["failed"] += 1
        await delivery.retry(reason)

    def _count(self, execution: Execution) -> None:
        tally = self._actor.tally
        tally["episodes"] += 1
        for sample in execution.samples:
            if sample.origin == "policy":
                tally["tokens"] += int(sample.loss_mask.sum())
            tally["prompt_tokens"] += sample.prompt_len
        self._actor.progressed()


def _refuses_prompt(error: EngineRefusedError, client: EngineClient) -> bool:
    """An engine refuses what the task itself brings (a prompt longer than its context), rather than what an episode made, or
    what somebody changed of the run's sampling: a change that no engine takes must not bury every task that comes."""
    own = client.journal is None or not client.journal.begun()
    return error.status in _BAD_REQUEST and own and not client.live.values


def _changed(client: EngineClient) -> str:
    """What a person should look at, where it may be that."""
    if not client.live.values:
        return ""
    return f"; sampling was changed to {dict(client.live.values)}: if it is that, `actorctl sampling RUN --reset`"


def _nothing() -> Sample:
    """The sample of an execution that was cut off: one prompt token, since a record has at least one, and no response."""
    return Sample(
        token_ids=np.zeros(1, np.int32),
        prompt_len=1,
        loss_mask=np.zeros(0, np.bool_),
        logprobs=np.zeros(0, np.float32),
        status="aborted",
        trainable=False,
    )


def _check_policies(samples: list[Sample], known: tuple[str, ...]) -> None:
    """Raises BadHookResultError for a sample that no policy, or no single one, can be trained on."""
    for number, sample in enumerate(samples):
        models = sorted({model_of([span]) for span in sample.spans}) if sample.trainable else []
        if models and models[0] not in known:
            raise BadHookResultError(
                f"the generate hook returned sample {number} with tokens of {models[0]}; expected those of"
                f" {' or '.join(known)}: mark a sample that nobody is trained on as not trainable"
            )
        if len(models) > 1:
            raise BadHookResultError(
                f"the generate hook returned sample {number} with tokens of {' and '.join(models)}; expected one policy's: give"
                " each policy a trajectory of its own, in which the other's turns are the environment's (docs/policies.md)"
            )


def _checked(samples: Any) -> list[Sample]:
    """Raises BadHookResultError for anything but a list of samples; what they hold, they have checked themselves."""
    if isinstance(samples, list) and all(isinstance(sample, Sample) for sample in samples):
        return samples
    kinds = sorted({type(sample).__name__ for sample in samples}) if isinstance(samples, list) else []
    found = f"a list of {', '.join(kinds)}" if kinds else type(samples).__name__
    raise BadHookResultError(f"the generate hook returned {found}; expected a list of bus.records.Sample")
