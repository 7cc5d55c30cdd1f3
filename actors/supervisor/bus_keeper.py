"""Keeps the bus: the embedded server is started, watched by pidfd and started again on its port when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import Final

import nats.errors

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.errors import ActorFailedError
from physarum.actors.supervisor.policy import Exit, GiveUp, RestartPolicy
from physarum.actors.supervisor.process import log_tail
from physarum.actors.supervisor.run_folder import write_endpoint
from physarum.actors.supervisor.store_watch import StoreWatch
from physarum.bus import layout
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.bus.errors import BusError
from physarum.bus.server import EmbeddedServer
from physarum.configs.root import RootConfig
from physarum.configs.secrets import read_secret

_log = logging.getLogger(__name__)

_RECONNECT_S: Final = 10.0


class BusKeeper:
    """The run's bus: its own server, or the one at `bus.url`, which is never started or stopped here."""

    def __init__(self, config: RootConfig, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._policy = RestartPolicy(config.supervisor)
        self._server = embedded_server(config, folder) if config.bus.url is None else None

    async def connect(self) -> Bus:
        """Starts the server when needed, tells the actors where it is, connects, and creates what streams are missing."""
        url = self._config.bus.url
        if self._server is not None:
            url = (await self._server.ensure()).url
        assert url is not None
        endpoint = Endpoint.of(self._config.bus, url)
        bus = await Bus.connect(endpoint, self._config.run.name, "supervisor", self._config.bus.start_timeout_s)
        try:
            await layout.create(bus, self._config.bus, tuple(self._config.policies), self._config.reward.partitions)
            write_endpoint(self._folder, endpoint)
        except BaseException:
            await bus.close()
            raise
        return bus

    async def keep(self, bus: Bus) -> None:
        """Restarts the embedded server whenever it dies. Raises ActorFailedError when it does not stay up."""
        server = self._server
        while server is not None:
            restored = bus.reconnections()
            await _until_dead(server)
            decision = self._policy.after_exit(Exit(None), ready=True, finished=False, now=time.monotonic())
            if isinstance(decision, GiveUp):
                raise ActorFailedError(
                    f"the run's nats-server {decision.reason}. Its last lines in {server.log_path}:\n"
                    f"{log_tail(server.log_path, 15)}"
                )
            _log.error("the run's nats-server died; starting it again on the same port")
            await server.ensure()
            await self._recreate(bus, restored)

    async def watch_store(self) -> None:
        """Heals the embedded server after its disk was full, for ever (store_watch.py)."""
        if self._server is not None:
            await StoreWatch(self._server.log_path, self._config.supervisor.heartbeat_s, self._server.stop).keep()

    async def stop(self) -> None:
        """Stops the embedded server; its store stays."""
        if self._server is not None:
            await self._server.stop()

    async def _recreate(self, bus: Bus, restored: asyncio.Event) -> None:
        """Streams in memory (METRICS) died with the server."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECONNECT_S):
                    await restored.wait()
            restored = bus.reconnections()
            try:
                await layout.create(bus, self._config.bus, tuple(self._config.policies), self._config.reward.partitions)
                return
            except (BusError, nats.errors.Error) as error:
                _log.warning("the streams are not back yet: %s", error)


def embedded_server(config: RootConfig, folder: RunFolder) -> EmbeddedServer:
    """The server of this run's folder, running or not.

    The streams' own limits add up to bus.max_store_bytes. The server must allow twice that: when a stream that exists
    is asked for again (a run that is continued), it checks for room as if it were another one.
    """
    credentials = {
        "token": read_secret(config.bus.token_env),
        "user": read_secret(config.bus.user_env),
        "password": read_secret(config.bus.password_env),
    }
    return EmbeddedServer(
        folder.bus,
        port=config.bus.port,
        max_store_bytes=2 * config.bus.max_store_bytes,
        start_timeout_s=config.bus.start_timeout_s,
        credentials={kind: value for kind, value in credentials.items() if value is not None},
    )


async def _until_dead(server: EmbeddedServer) -> None:
    """Returns when no process of the server is left."""
    record = server.running()
    if record is None:
        return
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
