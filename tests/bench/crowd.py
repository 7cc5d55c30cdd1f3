"""A thousand rollout actors on one bus: how soon a task is with a worker, what it costs the server, whether anybody starves.

Each worker is what the server knows of a rollout actor: a connection, heartbeats, reports, subscriptions to the presence of
engines and workers, claims, and the product's task queue with a waiting request on each class; an episode is a pause. `routed`
of them also take in what they hear and share engines. The janitor is the product's, engines are announcements. All share one
process beside the server, so `loop_lag_p99_ms` is part of every time.

    idle        tasks come one by one, most workers are free: from publishing a task to its lease
    saturated   more tasks than places: from a free place to its next task; how evenly tasks are spread

`told` False: each worker hears everybody's heartbeats itself (a crowd is never told), for comparison, at sizes that bear it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
import psutil

from physarum.actors.context import Context, Identity
from physarum.actors.janitor.actor import JanitorActor
from physarum.actors.rollout.router import PresenceRouter
from physarum.actors.rollout.tasks import TaskQueue
from physarum.actors.wire import publish_task
from physarum.bus import log, metrics, names, rollcall
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.presence import Heartbeat, Roster, announce
from physarum.bus.publisher import Publisher
from physarum.bus.records import Task
from physarum.bus.work import Delivery
from tests.bench.stage import Stage, open_stage

RECIPE: Final = Path(__file__).with_name("bus_tax.yaml")
_ROLES: Final = ("engine", "rollout")
_BEAT_S: Final = 2.0
_REPORT_S: Final = 1.0
_REPORT: Final[dict[str, object]] = {"tokens": 10_000, "prompt_tokens": 1000, "episodes": 1, "intervals": [[1e9, 1e9]]}
"""What a rollout actor says of its generation while it has requests."""
_LOAD_S: Final = 1.0
"""Between announcements of an engine, which carry its load."""
_OPENED_AT_ONCE: Final = 20
_SETTLED_S: Final = 5.0


@dataclass(frozen=True)
class Crowd:
    """`told`: by a roll call, as the product does it. `held_s`: the mean length of an episode; `busy`: the share of places that
    tasks keep busy while they come one by one; `rounds`: how often they fill every place when they come at once. `routed`:
    workers that also choose engines."""

    workers: int
    told: bool = True
    slots: int = 2
    engines: int = 16
    busy: float = 0.25
    idle_s: float = 15.0
    held_s: float = 8.0
    rounds: float = 3.0
    routed: int = 2


CROWDS: Final = {
    "smoke": (Crowd(80, engines=4, idle_s=4.0, held_s=1.0),),
    "full": (Crowd(100, told=False), Crowd(100), Crowd(200, told=False), Crowd(200), Crowd(1000)),
}


async def measure(size: str) -> dict[str, Any]:
    """One row for each crowd."""
    rows = []
    for crowd in CROWDS[size]:
        with tempfile.TemporaryDirectory(prefix="crowd-") as place, _never_told(not crowd.told):
            async with open_stage(Path(place) / "crowd", RECIPE, ["rollout.slots=2"]) as stage:
                rows.append(await _Measurement(stage, crowd).run())
    return {"rows": rows}


@contextmanager
def _never_told(wanted: bool) -> Iterator[None]:
    with mock.patch.object(rollcall, "CROWD", 1 << 30 if wanted else rollcall.CROWD):
        yield


@dataclass
class Seen:
    """What was timed: seconds from publishing to lease; when a place was free and when taken; tasks of each worker."""

    assigned_s: list[float] = field(default_factory=list)
    refills: list[tuple[float, float]] = field(default_factory=list)
    tasks: dict[str, int] = field(default_factory=dict)


class _Worker:
    """One rollout actor, as far as the bus knows it."""

    def __init__(self, context: Context, crowd: Crowd, rng: random.Random) -> None:
        self.context, self._crowd, self._rng = context, crowd, rng
        self.name = context.identity.instance
        self.seen = Seen()
        self.notified_s: list[float] = []
        self._router: PresenceRouter | None = None

    def notify(self) -> None:
        if self._router is not None:
            began = time.perf_counter()
            self._router.notify()
            self.notified_s.append(time.perf_counter() - began)

    @asynccontextmanager
    async def working(self, routes: bool) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if routes:
                await self._route(stack)
            await self.context.heartbeat_publisher.start()
            queue = await stack.enter_async_context(TaskQueue(self.context, self._crowd.slots).open())
            tasks = [asyncio.create_task(one) for one in (self.context.claims.keep(), self._work(queue))]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _route(self, stack: AsyncExitStack) -> None:
        """As the actor does it."""
        engines, workers = [Roster(self.context.bus, role, on_change=self.notify) for role in _ROLES]
        for roster in (engines, workers):
            await stack.enter_async_context(roster.open())
        self._router = PresenceRouter(engines, "policy", workers=workers, me=self.name)

    async def listen(self) -> asyncio.Transport:
        """As the server sees a roster, whose work would be on another machine."""
        run, url = self.context.bus.run, urlsplit(self.context.endpoint.url)
        told = [names.rollcall_subject(run, role) for role in _ROLES]
        subjects = told if self._crowd.told else [f"ph.{run}.presence.{role}.*" for role in _ROLES]
        made = await asyncio.get_running_loop().create_connection(lambda: _Ear(subjects), url.hostname, url.port)
        return made[0]

    async def _work(self, queue: TaskQueue) -> None:
        free_since, held = [time.perf_counter()] * self._crowd.slots, set[asyncio.Task[None]]()
        while (delivery := await queue.next(self.context.draining)) is not None:
            self.seen.assigned_s.append(time.time() - decode(delivery.data, Task).issued_at)
            self.seen.refills.append((free_since.pop(0), time.perf_counter()))
            self.seen.tasks[self.name] = self.seen.tasks.get(self.name, 0) + 1
            task = asyncio.create_task(self._hold(delivery, queue, free_since))
            held.add(task)
            task.add_done_callback(held.discard)

    async def _hold(self, delivery: Delivery, queue: TaskQueue, free_since: list[float]) -> None:
        await asyncio.sleep(self._crowd.held_s * self._rng.uniform(0.5, 1.5))
        await delivery.ack()
        queue.free()
        free_since.append(time.perf_counter())


class _Measurement:
    """One crowd on one bus."""

    def __init__(self, stage: Stage, crowd: Crowd) -> None:
        self._stage, self._crowd = stage, crowd
        self._workers: list[_Worker] = []
        self._ordinals = count()
        self._lags: list[float] = []

    async def run(self) -> dict[str, Any]:
        crowd, began = self._crowd, time.perf_counter()
        async with AsyncExitStack() as stack:
            await self._open(stack)
            background = [
                self._engines(),
                self._beats(),
                self._lag(),
                JanitorActor(await self._stage.actor_context("janitor")).run(),
            ]
            for work in background:
                stack.callback(asyncio.create_task(work).cancel)
            opened_s = time.perf_counter() - began
            await asyncio.sleep(_SETTLED_S)
            for ear in await asyncio.gather(*(one.listen() for one in self._workers[crowd.routed :])):
                stack.callback(ear.close)
            gc.collect()
            gc.freeze()  # a thousand connections are not looked through again and again
            await asyncio.sleep(_SETTLED_S)
            self._lags.clear()
            quiet, _ = await self._cores(asyncio.sleep(_SETTLED_S))
            idle, _ = await self._cores(self._trickle())
            assigned = self._take()
            flooded = time.perf_counter()
            saturated, own = await self._cores(self._flood())
            ended = time.perf_counter()
            await self._until_left(0)
            full = self._take()
        refilled_s = [taken - free for free, taken in full.refills if free >= flooded and taken <= ended]
        counts = [full.tasks.get(one.name, 0) for one in self._workers]
        routed = [seconds for one in self._workers for seconds in one.notified_s]
        return {
            "workers": crowd.workers,
            "told": crowd.told,
            "opened_s": round(opened_s, 1),
            "assigned_p50_ms": _ms(assigned.assigned_s, 0.5),
            "assigned_p99_ms": _ms(assigned.assigned_s, 0.99),
            "refilled_p50_ms": _ms(refilled_s, 0.5),
            "refilled_p99_ms": _ms(refilled_s, 0.99),
            "refilled_most_ms": _ms(refilled_s, 1.0),
            "tasks": sum(counts),
            "tasks_per_worker_least": min(counts),
            "tasks_per_worker_most": max(counts),
            "jain": round(sum(counts) ** 2 / (len(counts) * sum(value**2 for value in counts)), 4),
            "server_cores_quiet": quiet,
            "server_cores_idle": idle,
            "server_cores_saturated": saturated,
            "own_cores_saturated": own,
            "router_notify_p99_ms": _ms(routed, 0.99),
            "loop_lag_p99_ms": _ms(self._lags, 0.99),
            "messages_left": (await log.state(self._stage.bus, "tasks")).messages,
        }

    @property
    def _places(self) -> int:
        return self._crowd.workers * self._crowd.slots

    async def _open(self, stack: AsyncExitStack) -> None:
        """Every worker, some at a time."""
        room = asyncio.Semaphore(_OPENED_AT_ONCE)

        async def open_one(number: int) -> None:
            async with room:
                own, rng = self._stage.context, random.Random(number)
                bus = await Bus.connect(own.endpoint, own.config.run.name, f"rollout-{number}")
                identity = Identity(bus.run, "rollout", f"rollout-{number}")
                publisher = await Publisher(bus).start()
                worker = _Worker(
                    Context(identity, own.config, own.folder, own.endpoint, bus, publisher), self._crowd, rng
                )
                stack.push_async_callback(bus.close)
                await stack.enter_async_context(worker.working(number < self._crowd.routed))
                self._workers.append(worker)

        await asyncio.gather(*(open_one(number) for number in range(self._crowd.workers)))

    async def _engines(self) -> None:
        """Announcements as an engine's actor makes them, with a load that changes each time."""
        publisher, rng = await Publisher(self._stage.bus).start(), random.Random(0)

        def facts(number: int) -> dict[str, Any]:
            load = {"there": rng.randrange(64), "tokens": rng.randrange(100_000), "limit": 128, "capacity": 1 << 20}
            return {"group": "policy", "url": f"http://10.0.0.{number}:30000", "version": "policy@1.0", "load": load}

        for sequence in count(1):
            beats = [_heartbeat("engine", f"policy-{one}", sequence, facts(one)) for one in range(self._crowd.engines)]
            await asyncio.gather(
                *(announce(self._stage.bus, publisher, beat) for beat in beats), asyncio.sleep(_LOAD_S)
            )

    async def _beats(self) -> None:
        """Each worker's heartbeat and reports, evenly over the period."""
        publisher, facts = await Publisher(self._stage.bus).start(), {"demand": self._crowd.slots}

        async def later(delay_s: float, beat: Heartbeat) -> None:
            await asyncio.sleep(delay_s)
            await announce(self._stage.bus, publisher, beat)
            for _ in range(int(_BEAT_S / _REPORT_S)):
                await metrics.emit(self._stage.bus, "rollout", beat.instance, "generation", _REPORT)

        for sequence in count(1):
            beats = [_heartbeat("rollout", worker.name, sequence, facts) for worker in self._workers]
            spread = (later(_BEAT_S * place / len(beats), beat) for place, beat in enumerate(beats))
            await asyncio.gather(*spread, asyncio.sleep(_BEAT_S))

    async def _lag(self) -> None:
        while True:
            due = time.perf_counter() + 0.05
            await asyncio.sleep(0.05)
            self._lags.append(time.perf_counter() - due)

    async def _cores(self, work: Any) -> tuple[float, float]:
        """Cores that the server and this process took while `work` went on."""
        both = (self._stage.server, psutil.Process())
        began, before = time.perf_counter(), [sum(one.cpu_times()[:2]) for one in both]
        await work
        seconds = time.perf_counter() - began
        server, own = (sum(one.cpu_times()[:2]) - old for one, old in zip(both, before, strict=True))
        return round(server / seconds, 3), round(own / seconds, 3)

    async def _trickle(self) -> None:
        rng, loop = random.Random(1), asyncio.get_running_loop()
        end, rate_per_s = loop.time() + self._crowd.idle_s, self._places * self._crowd.busy / self._crowd.held_s
        while loop.time() < end:
            await asyncio.sleep(rng.expovariate(rate_per_s))
            await self._publish(1)
        await self._until_left(0)

    async def _flood(self) -> None:
        """Until no task waits for a place any more."""
        await self._publish(int(self._places * self._crowd.rounds))
        await self._until_left(self._places)

    async def _publish(self, number: int) -> None:
        await asyncio.gather(*(self._task(next(self._ordinals)) for _ in range(number)))

    async def _task(self, ordinal: int) -> None:
        task = Task(
            id=f"rows/0/{ordinal}/0", run=self._stage.bus.run, source="rows", ordinal=ordinal, group=f"rows/0/{ordinal}",
            group_size=1, member=0, issued_at=time.time(),
        )  # fmt: skip
        await publish_task(self._stage.context, task)

    async def _until_left(self, number: int) -> None:
        while (await log.state(self._stage.bus, "tasks")).messages > number:
            await asyncio.sleep(0.1)

    def _take(self) -> Seen:
        """What was seen since the last call."""
        found = Seen()
        for worker in self._workers:
            seen, worker.seen = worker.seen, Seen()
            found.assigned_s += seen.assigned_s
            found.refills += seen.refills
            found.tasks |= seen.tasks
        return found


class _Ear(asyncio.Protocol):
    """A NATS connection that takes what it subscribed to and does nothing with it."""

    def __init__(self, subjects: list[str]) -> None:
        self._subjects = subjects

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        lines = ['CONNECT {"verbose":false,"headers":true,"protocol":1}']
        lines += [f"SUB {subject} {number}" for number, subject in enumerate(self._subjects, 1)]
        self._transport.write("".join(f"{line}\r\n" for line in lines).encode())

    def data_received(self, data: bytes) -> None:
        if b"PING\r\n" in data:
            self._transport.write(b"PONG\r\n")


def _heartbeat(role: str, instance: str, sequence: int, facts: dict[str, Any]) -> Heartbeat:
    return Heartbeat(
        role=role, instance=instance, state="ready", pid=1, host="h", started_at=1.0, sequence=sequence, facts=facts
    )


def _ms(seconds: list[float], share: float) -> float | None:
    return round(1e3 * float(np.quantile(seconds, share)), 2) if seconds else None
