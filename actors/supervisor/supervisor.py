"""One machine's supervisor: start model, bus, actors; then watch until the run is finished, fails, or is stopped.

      lock -> config.yaml -> start model -> bus -> announce -> start or adopt actors -> watch
    finished:     drain actors -> account and summary (the bus is still up) -> stop the bus
    an actor fails for good, or the user stops: drain -> stop the bus; the run can be continued
    this process is killed: actors and bus work on, and the next supervisor adopts them

Nothing that this run did not start is ever touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import psutil

from physarum.actors import scaling, states, summary
from physarum.actors.context import RunFolder
from physarum.actors.model_maker import Reporter, link_start_model
from physarum.actors.policies import trainer_instance
from physarum.actors.supervisor import ending, run_folder
from physarum.actors.supervisor.attendance import INSTANCE, SUPERVISOR, Attendance
from physarum.actors.supervisor.bus_keeper import BusKeeper
from physarum.actors.supervisor.crew import Crew
from physarum.actors.supervisor.errors import InterruptedRunError
from physarum.actors.supervisor.feed import MetricsFeed
from physarum.actors.supervisor.keeper import Keeper
from physarum.actors.supervisor.launcher import CommandFor, Launcher, actor_command
from physarum.actors.supervisor.live import LiveRun, Observer
from physarum.actors.supervisor.log_bound import LogBound
from physarum.actors.supervisor.run_lock import RunLock
from physarum.actors.supervisor.scaler import Scaler
from physarum.actors.supervisor.stop import StopRequest
from physarum.bus import control
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.presence import GONE, Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.root import RootConfig
from physarum.weightsync.area import SharedArea

_log = logging.getLogger(__name__)

Summary = dict[str, Any]

_LAST_SEQUENCE: Final = 1 << 62
"""The goodbye comes after every other heartbeat of this process."""


class Supervisor:
    """Runs one configuration. `observer_for` is called for this run, and for the run that makes its start model."""

    def __init__(
        self,
        config: RootConfig,
        stop: StopRequest,
        reporter: Reporter,
        observer_for: Callable[[RootConfig], Observer],
        *,
        command_for: CommandFor = actor_command,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._stop = stop
        self._reporter = reporter
        self._observer_for = observer_for
        self._command_for = command_for
        self._on_started = on_started
        self.folder = RunFolder(config.run.folder)

    async def run(self) -> Summary:
        """The summary of the finished run.

        Raises RunHeldError, RunDiffersError, RunFinishedError, ActorFailedError, StartModelError, InterruptedRunError,
        or an error of the bus or the configuration.
        """
        with RunLock(self.folder.path):
            run_folder.refuse_unusable(self.folder, self._config)
            run_folder.prepare(self.folder, self._config)
            for view in self._config.views():
                folder = self.folder.of_policy(view.policy)
                await link_start_model(view, folder, self._stop, self._train, self._reporter)
            keeper = BusKeeper(self._config, self.folder)
            try:
                bus = await self._stop.guard(keeper.connect())
                try:
                    return await self._with_bus(bus, keeper)
                finally:
                    await bus.close()
            finally:
                await keeper.stop()
                await asyncio.to_thread(SharedArea.remove_of_run, self.folder.path)

    async def _train(self, config: RootConfig) -> Path:
        """The run that makes the start model: a supervisor, a bus and actors of its own, before ours start."""
        made = Supervisor(config, self._stop, self._reporter, self._observer_for, command_for=self._command_for)
        if not made.folder.summary.is_file():
            await made.run()
        return made.folder.model

    async def _with_bus(self, bus: Bus, bus_keeper: BusKeeper) -> Summary:
        publisher = await Publisher(bus).start()
        tally = summary.Tally()
        observer = self._observer_for(self._config)
        launcher = Launcher(self._config, self.folder, self._command_for)
        attendance = Attendance(bus, publisher, self._config.supervisor, lambda instance: crew.kill_hung(instance))
        register = Register(bus, publisher, "run", states.Scaled)
        scaled = (await register.get(states.SCALE)).value

        def keeper_of(role: str, instance: str) -> Keeper:
            return Keeper(role, instance, launcher, attendance, self._config.supervisor)

        wanted = scaling.members(self._config, scaled)
        # Who is no longer wanted, but works, is adopted too: it drains as soon as the scaler looks.
        left = [one for one in launcher.left_running() if one not in wanted]
        keepers = [keeper_of(role, instance) for role, instance in (*wanted, *left)]
        crew = Crew(self.folder, keepers, self._stop, self._config.supervisor.drain_timeout_s)
        scaler = Scaler(self._config, register, crew, keeper_of)
        live = LiveRun(self._config, self.folder, bus, crew.records, lambda: attendance.roster.members)
        # The table and the summary's reports are of the run's own policy; the others are in `actorctl ps` and the summary.
        others = {trainer_instance(policy) for policy in self._config.policies}
        feed = MetricsFeed(bus, [tally.add, observer.on_metric], others)
        async with attendance.roster.open(), feed.open(), self._announced(bus, publisher), self._controlled(bus):
            display = _background(observer.observe(live), "display")
            async with display, _background(bus_keeper.watch_store(), "watch of the store"):
                await self._watch(bus, publisher, bus_keeper, crew, scaler)
            return await self._conclude(bus, tally)

    async def _watch(self, bus: Bus, publisher: Publisher, bus_keeper: BusKeeper, crew: Crew, scaler: Scaler) -> None:
        """From the start of the actors to the end of the last one. Returns when the run is finished."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            for keeper in crew.keepers:
                keeper.begin()
            tasks = [asyncio.create_task(keeper.keep(), name=f"keeper of {keeper.instance}") for keeper in crew.keepers]
            tasks.append(asyncio.create_task(bus_keeper.keep(bus), name="keeper of the bus"))
            tasks.append(asyncio.create_task(scaler.keep(), name="scaler"))
            logs = LogBound(self.folder.logs, self._config.supervisor.log_bytes, self._config.supervisor.heartbeat_s)
            tasks.append(asyncio.create_task(logs.keep(), name="bound of the logs"))
            self._on_started()
            finished = asyncio.create_task(ending.finished(bus, publisher, self._config), name="end of the run")
            asked = asyncio.create_task(self._stop.asked.wait(), name="stop request")
            tasks += [finished, asked]
            await _until(finished, asked, tasks)
        finally:
            await crew.drain()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _conclude(self, bus: Bus, tally: summary.Tally) -> Summary:
        result = await summary.summarise(bus, self._config, self.folder, tally)
        run_folder.write_atomic(self.folder.summary, orjson.dumps(result, option=orjson.OPT_INDENT_2))
        return result

    @contextlib.asynccontextmanager
    async def _announced(self, bus: Bus, publisher: Publisher) -> AsyncIterator[None]:
        """Actors see that they are claimed; they drain by themselves after run.orphan_timeout_s without a supervisor."""
        beat = Heartbeat(
            role=SUPERVISOR,
            instance=INSTANCE,
            state="ready",
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=psutil.Process().create_time(),
            sequence=0,
        )
        period_s = self._config.supervisor.heartbeat_s
        try:
            async with _background(_announce_for_ever(bus, publisher, beat, period_s), "heartbeat"):
                yield
        finally:
            goodbye = msgspec.structs.replace(beat, sequence=_LAST_SEQUENCE, state=GONE)
            await _announce_once(bus, publisher, goodbye, period_s)

    @contextlib.asynccontextmanager
    async def _controlled(self, bus: Bus) -> AsyncIterator[None]:
        async def status(body: dict[str, Any]) -> dict[str, Any]:
            return {"run": self._config.run.name, "pid": os.getpid(), "stopping": self._stop.asked.is_set()}

        async def down(body: dict[str, Any]) -> dict[str, Any]:
            self._stop.ask()
            return await status(body)

        service = await control.serve(bus, SUPERVISOR, INSTANCE, {"status": status, "down": down})
        try:
            yield
        finally:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(2.0):
                    await service.stop()


async def _until(finished: asyncio.Task[Any], asked: asyncio.Task[Any], tasks: list[asyncio.Task[Any]]) -> None:
    """Returns when the run is finished; raises what ended a keeper, or InterruptedRunError."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if finished in done:
            return
        if asked in done:
            raise InterruptedRunError(
                "stopped before the run was finished; start the same configuration to continue it"
            )


async def _announce_for_ever(bus: Bus, publisher: Publisher, beat: Heartbeat, period_s: float) -> None:
    while True:
        beat = msgspec.structs.replace(beat, sequence=beat.sequence + 1, progress_at=time.time())
        await _announce_once(bus, publisher, beat, period_s)
        await asyncio.sleep(period_s)


async def _announce_once(bus: Bus, publisher: Publisher, beat: Heartbeat, timeout_s: float) -> None:
    try:
        await announce(bus, publisher, beat, timeout_s=timeout_s)
    except BusError as error:
        _log.info("the supervisor's heartbeat was not stored: %s", error)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Runs `work` beside the block; its failure is logged and changes nothing else."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the supervisor's %s failed: %r; the run goes on without it", task.get_name(), error, exc_info=error)
