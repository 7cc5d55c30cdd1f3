"""A run's bus, whether the run is live or not: an embedded server that nobody runs is started for the time of the visit.

Invariant: a server that no supervisor, actor or other visitor answers for (we started it, or one that was killed left it)
is not running after the visit; while we answer for it we hold the run's lock, so no supervisor starts beside us.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import msgspec

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.bus_keeper import embedded_server
from physarum.actors.supervisor.errors import NotRunningError
from physarum.actors.supervisor.process import read_records
from physarum.actors.supervisor.run_folder import refuse_unfinished
from physarum.actors.supervisor.run_lock import RunLock, holder
from physarum.actors.tools.errors import NotInRunError, RunUnfitError
from physarum.bus import names
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.names import StreamKey
from physarum.bus.publisher import Publisher
from physarum.configs.loader import resolve
from physarum.configs.root import RootConfig


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A connected run, as one of its policies has it. `live`: a supervisor or an actor of it is there on this host."""

    folder: RunFolder
    config: RootConfig
    bus: Bus
    publisher: Publisher
    live: bool

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def ledger(self) -> StreamKey:
        """The policy's."""
        return names.ledger_of(self.config.policy)

    def of_policy(self, name: str | None) -> OpenRun:
        """The same run for another policy; None: as it is. Raises NotInRunError for one that the run does not train."""
        own = self.config.of_policy("").model.name
        if name is not None and name != own and name not in self.config.policies:
            there = ", ".join((own, *self.config.policies))
            raise NotInRunError(f"run {self.name} trains no policy {name!r}; there are: {there}")
        policy = self.config.policy if name is None else "" if name == own else name
        return replace(self, config=self.config.of_policy(policy), folder=self.folder.of_policy(policy))

    def of_label(self, label: str | None) -> OpenRun:
        """The same run for the policy that a version's label names; as it is where it names none of the run's."""
        model = label.partition("@")[0] if label is not None and "@" in label else None
        known = (self.config.of_policy("").model.name, *self.config.policies)
        return self.of_policy(model if model in known else None)

    def refuse_several(self, command: str) -> None:
        """Raises RunUnfitError where the run trains several policies, for what makes a run of one."""
        if self.config.policies:
            raise RunUnfitError(
                f"run {self.name} trains {', '.join((self.config.model.name, *self.config.policies))}; expected one policy for"
                f" actorctl {command}. Export each model (actorctl checkpoints export-hf --policy NAME) and start a new run"
            )

    @property
    def finished(self) -> bool:
        """It has its summary: no actor will take anything from its streams again."""
        return self.folder.summary.is_file()


@contextlib.asynccontextmanager
async def opened(folder: RunFolder, tool: str) -> AsyncIterator[OpenRun]:
    """Connects as `tool`. Raises NotRunningError (never had a bus), RunUnfinishedError, RunHeldError, or one of the bus."""
    refuse_unfinished(folder)
    config = resolve(folder.config)
    live = holder(folder.path) is not None or any(record.alive for record in read_records(folder.actors))
    async with contextlib.AsyncExitStack() as stack:
        endpoint = await _endpoint(stack, config, folder, live)
        bus = await Bus.connect(endpoint, config.run.name, tool, config.bus.start_timeout_s)
        stack.push_async_callback(bus.close)
        yield OpenRun(folder, config, bus, await Publisher(bus).start(), live)


async def _endpoint(stack: contextlib.AsyncExitStack, config: RootConfig, folder: RunFolder, live: bool) -> Endpoint:
    if config.bus.url is not None:
        return _recorded(folder)
    server = embedded_server(config, folder)
    running = server.running()
    if running is None and not (folder.bus / "store").is_dir():
        raise NotRunningError(
            f"run {folder.path.name} never started its bus, so it holds nothing; start it (actorctl up)"
        )
    if running is None or not live:
        stack.enter_context(RunLock(folder.path))
        running = await server.ensure()
        stack.push_async_callback(server.stop)
    return Endpoint.of(config.bus, running.url)


def _recorded(folder: RunFolder) -> Endpoint:
    try:
        return msgspec.json.decode(folder.endpoint.read_bytes(), type=Endpoint)
    except FileNotFoundError:
        raise NotRunningError(f"run {folder.path.name} has never started its bus; start it with actorctl up") from None
