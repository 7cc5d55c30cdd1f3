"""The router's process: its arguments checked against the installed sglang-router, then started under a guardian."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from physarum.actors.engine.arguments import Rules, checked_arguments, render
from physarum.actors.engine.environment import engine_environment
from physarum.actors.engine.port import ReservedPort
from physarum.actors.engine.process import ServerProcess, guarded
from physarum.actors.engine.schema import ROUTER, ServerSchema, inspect_program

_log = logging.getLogger(__name__)

_FOUND: Final = "physarum tells the router which engines there are, as they come and go"
RULES: Final = Rules(
    "sglang-router",
    "sglang_router.launch_router",
    {
        "host": "a router that physarum starts listens on loopback; for one elsewhere set engines.<group>.router",
        "port": "a free port is reserved at start; for a router elsewhere set engines.<group>.router",
        "worker-urls": _FOUND,
        "prefill": _FOUND,
        "decode": _FOUND,
        "service-discovery": _FOUND,
        "pd-disaggregation": "pairs are chosen by the rollout actors, which know the versions of both",
        "mini-lb": "it takes no engines while it runs",
        "api-key": "secrets never stand on a command line, where every user of the host reads them",
        "enable-igw": "one router is in front of one group",
    },
)
_METRICS: Final = "prometheus-port"
"""The router serves its metrics, at a port that is the same for all unless it is told another."""


def router_command(python: Path, port: int, metrics: int, user: Mapping[str, Any], schema: ServerSchema) -> list[str]:
    """The whole command of one router. Raises EngineArgumentError naming every argument that cannot stand."""
    known = schema.by_name()
    arguments: dict[str, Any] = {_METRICS: metrics} if _METRICS in known else {}
    arguments |= checked_arguments(user, schema, RULES)
    command = [str(python), "-m", RULES.module, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in arguments.items():
        command += render(known[name], name, value)
    return command


async def start_router(
    python: Path, user: Mapping[str, Any], environment: Mapping[str, str], log_file: Path, cache: Path | None = None
) -> ServerProcess:
    """Raises EngineArgumentError, EngineInspectionError (where sglang-router is not installed)."""
    ours = engine_environment("cuda", environment)  # it imports no model: no stand-ins
    schema = await inspect_program(ROUTER, python, ours, cache)
    port, metrics = ReservedPort(), ReservedPort()
    try:
        command = router_command(python, port.number, metrics.number, user, schema)
        guardian = await guarded(command, ours, log_file, 0.0)
    except BaseException:
        port.close()
        metrics.close()
        raise
    _log.info("sglang-router on port %d: %s", port.number, " ".join(command))
    return ServerProcess(guardian, [port, metrics], log_file, 0.0, "sglang-router")
