"""What a supervisor answers on its control service: how it is, that it is to end its part, and the last lines of its logs."""

from __future__ import annotations

import os
from typing import Any, Final

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.process import log_tail
from physarum.actors.supervisor.stop import StopRequest
from physarum.agents.engine_key import engine_key
from physarum.bus import control
from physarum.configs.root import RootConfig
from physarum.configs.secrets import read_secret

_ANSWER_BYTES: Final = 512 << 10
"""A message of NATS holds a MiB."""


def supervisor_verbs(config: RootConfig, folder: RunFolder, stop: StopRequest) -> dict[str, control.Verb]:
    """`status`, `down` (with `now`: at once), `logs` (`instance`: one, else all; `lines` of each)."""

    async def status(body: dict[str, Any]) -> dict[str, Any]:
        return {"run": config.run.name, "pid": os.getpid(), "stopping": stop.asked.is_set()}

    async def down(body: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2 if body.get("now") and not stop.asked.is_set() else 1):
            stop.ask()
        return await status(body)

    async def logs(body: dict[str, Any]) -> dict[str, Any]:
        return {"logs": last_lines(folder, body.get("instance"), int(body.get("lines", 20)), _key(config))}

    return {"status": status, "down": down, "logs": logs}


def _key(config: RootConfig) -> str | None:
    """Of the run's engines, which write it into their logs."""
    token = read_secret(config.checkpoint.token_env) if config.machines else None
    return None if token is None else engine_key(token)


def last_lines(folder: RunFolder, instance: str | None, lines: int, hidden: str | None = None) -> dict[str, str]:
    """The ends of the logs by instance, without `hidden`, no more than a message holds. Raises ValueError for one that is not
    there."""
    found = {path.stem: path for path in sorted(folder.logs.glob("*.log"))}
    if instance is not None and instance not in found:
        raise ValueError(f"no log of {instance!r} here; there are: {', '.join(found) or 'none'}")
    chosen = found if instance is None else {instance: found[instance]}
    texts = {name: log_tail(path, lines).replace(hidden or "\0", "***") for name, path in chosen.items()}
    each = _ANSWER_BYTES // max(1, len(texts))
    return {name: text.encode()[-each:].decode(errors="replace") for name, text in texts.items()}
