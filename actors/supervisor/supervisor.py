"""A run's supervisor (of several machines: the head's): start model, bus, actors; then watch until it finishes, fails or is
stopped.

      lock -> config.yaml -> start model -> bus -> announce -> start or adopt actors -> watch
    finished:     drain actors -> account and summary (the bus is still up) -> stop the bus
    an actor fails for good, or the user stops: drain -> stop the bus; the run can be continued
    this process is killed: actors and bus work on, and the next supervisor adopts them

Nothing that this run did not start is ever touched. The other machines of a run have supervisors of their own (machine.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from physarum.actors import summary
from physarum.actors.address import towards
from physarum.actors.context import RunFolder
from physarum.actors.model_maker import Reporter, link_start_model
from physarum.actors.policies import trainer_instance
from physarum.actors.supervising import INSTANCE
from physarum.actors.supervisor import ending, run_folder
from physarum.actors.supervisor.announcing import announced, background, controlled
from physarum.actors.supervisor.assembly import Head
from physarum.actors.supervisor.bus_keeper import BusKeeper
from physarum.actors.supervisor.clocks import refuse_other_times
from physarum.actors.supervisor.feed import MetricsFeed
from physarum.actors.supervisor.launcher import CommandFor, actor_command
from physarum.actors.supervisor.live import LiveRun, Observer
from physarum.actors.supervisor.machine_lease import MachineLease
from physarum.actors.supervisor.part import Part, Place, Work
from physarum.actors.supervisor.run_lock import RunLock
from physarum.actors.supervisor.stop import StopRequest
from physarum.actors.supervisor.verbs import supervisor_verbs
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.configs.machines import HEAD
from physarum.configs.root import RootConfig
from physarum.weightsync.area import SharedArea

_log = logging.getLogger(__name__)

Summary = dict[str, Any]


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
        self._place = await asyncio.to_thread(self._placed)
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

    def _placed(self) -> Place:
        """Asks for the address of a name, so: blocking."""
        url = self._config.bus.url if self._config.machines else None
        address = None if url is None else towards(url)
        return Place(
            config=self._config, folder=self.folder, stop=self._stop, address=address, command_for=self._command_for
        )

    async def _train(self, config: RootConfig) -> Path:
        """The run that makes the start model: a supervisor, a bus and actors of its own, before ours start."""
        made = Supervisor(config, self._stop, self._reporter, self._observer_for, command_for=self._command_for)
        if not made.folder.summary.is_file():
            await made.run()
        return made.folder.model

    async def _with_bus(self, bus: Bus, bus_keeper: BusKeeper) -> Summary:
        publisher = await Publisher(bus).start()
        if self._config.bus.url is None:  # its store is locked
            return await self._lead(bus, publisher, {"keeper of the bus": partial(bus_keeper.keep, bus)}, bus_keeper)
        if self._config.machines:
            await refuse_other_times(bus)
        lease = MachineLease(bus, publisher, HEAD)
        async with lease.held():
            return await self._lead(bus, publisher, {"lease": lease.keep}, bus_keeper)

    async def _lead(self, bus: Bus, publisher: Publisher, beside: Mapping[str, Work], bus_keeper: BusKeeper) -> Summary:
        tally = summary.Tally()
        observer = self._observer_for(self._config)
        part = await Part.of(self._place, bus, publisher)
        roster = part.attendance.roster
        live = LiveRun(self._config, self.folder, bus, part.crew.records, lambda: roster.members)
        # The table and the summary's reports are of the run's own policy; the others are in `actorctl ps` and the summary.
        others = {trainer_instance(policy) for policy in self._config.policies}
        feed = MetricsFeed(bus, [tally.add, observer.on_metric], others)
        period_s, verbs = self._config.supervisor.heartbeat_s, supervisor_verbs(self._config, self.folder, self._stop)
        head = Head(self._config, bus, publisher, self._place.address)
        async with (
            roster.open(),
            feed.open(),
            announced(bus, publisher, INSTANCE, period_s, self._facts()),
            controlled(bus, INSTANCE, verbs),
        ):
            await head.open()
            display = background(observer.observe(live), "display")
            async with display, background(bus_keeper.watch_store(), "watch of the store"):
                over = partial(ending.finished, bus, publisher, self._config)
                alone = partial(head.until_alone, roster, self._stop.at_once)
                await part.work(over, beside, self._on_started, head.end, alone)
            return await self._conclude(bus, tally)

    async def _conclude(self, bus: Bus, tally: summary.Tally) -> Summary:
        result = await summary.summarise(bus, self._config, self.folder, tally)
        run_folder.write_atomic(self.folder.summary, orjson.dumps(result, option=orjson.OPT_INDENT_2))
        return result

    def _facts(self) -> Mapping[str, Any]:
        """Of several machines: which one this is."""
        if not self._config.machines:
            return {}
        return {"machine": HEAD, "address": self._place.address, "folder": str(self.folder.path)}
