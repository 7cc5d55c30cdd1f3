"""`actorctl ledger`: the account of a live, an interrupted or a finished run."""

from __future__ import annotations

from typing import Any

import orjson

from physarum.actors.account import account
from physarum.actors.actorctl.target import recorded_config, recorded_endpoint
from physarum.actors.context import RunFolder
from physarum.actors.supervisor.bus_keeper import embedded_server
from physarum.actors.supervisor.errors import NotRunningError
from physarum.bus.connection import Bus
from physarum.bus.endpoint import Endpoint
from physarum.configs.root import RootConfig


async def account_of(folder: RunFolder, recount: bool) -> dict[str, Any]:
    """Counted on the bus when that is up; else from the summary, or (`recount`, or none) with the server started for it.

    Raises NotRunningError for a run without a bus, or BusUnreachableError.
    """
    config = recorded_config(folder)
    if config.bus.url is not None:
        return await _count(recorded_endpoint(folder), config)
    server = embedded_server(config, folder)
    if (running := server.running()) is not None:
        return await _count(Endpoint.of(config.bus, running.url), config)
    if not recount and folder.summary.is_file():
        found: dict[str, Any] = orjson.loads(folder.summary.read_bytes())["account"]
        return found
    if not (folder.bus / "store").is_dir():
        raise NotRunningError(f"run {folder.path.name} has never started its bus: there is nothing to count")
    try:
        return await _count(Endpoint.of(config.bus, (await server.ensure()).url), config)
    finally:
        await server.stop()


async def _count(endpoint: Endpoint, config: RootConfig) -> dict[str, Any]:
    bus = await Bus.connect(endpoint, config.run.name, "ledger", config.bus.start_timeout_s)
    try:
        return (await account(bus)).to_dict()
    finally:
        await bus.close()


def closes(found: dict[str, Any]) -> bool:
    """Nothing lost and nothing trained twice."""
    return int(found["imbalance"]) == 0 and int(found["double_trained"]) == 0
