"""Which machines of a run are there, by the heartbeats of their supervisors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from physarum.actors.supervising import supervisor_on
from physarum.bus.presence import Heartbeat
from physarum.configs.placement import machine_names
from physarum.configs.root import RootConfig

ABSENT: Final = "absent"
_LISTED: Final = 8


def machine_rows(config: RootConfig, heartbeats: Sequence[Heartbeat]) -> list[dict[str, Any]]:
    """Each machine with its supervisor (`host`, `address`, `pid`, null where it is absent); none of a run on one machine."""
    beats = {beat.instance: beat for beat in heartbeats}
    names = machine_names(config) if config.machines else ()
    return [_row(name, beats.get(supervisor_on(name))) for name in names]


def _row(name: str, beat: Heartbeat | None) -> dict[str, Any]:
    if beat is None:
        return {"machine": name, "state": ABSENT, "host": None, "address": None, "pid": None}
    address = beat.facts.get("address")
    return {"machine": name, "state": beat.state, "host": beat.host, "address": address, "pid": beat.pid}


def machines_text(rows: Sequence[dict[str, Any]]) -> str:
    """`head (node1), gpu-0 (node2); absent: gpu-1`; empty for one machine."""
    there = [f"{row['machine']} ({row['host']})" for row in rows if row["state"] != ABSENT]
    away = [row["machine"] for row in rows if row["state"] == ABSENT]
    text = _few(there)
    return text if not away else f"{text}; absent: {_few(away)}" if text else f"absent: {_few(away)}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
