"""Numbers for tables, plots and summaries. They may be lost; nothing that must be exact is read from them."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from physarum.bus import names
from physarum.bus.codec import decode, encode
from physarum.bus.connection import Bus
from physarum.bus.log import LogEntry
from physarum.bus.names import RUN_HEADER


class Metric(msgspec.Struct, kw_only=True):
    """One report of one actor. `kind` names the schema of `values` ("step", "generation", "swap", ...)."""

    kind: str
    role: str
    instance: str
    at: float
    values: dict[str, Any]


async def emit(bus: Bus, role: str, instance: str, kind: str, values: dict[str, Any]) -> None:
    """Publishes without waiting for a receipt."""
    metric = Metric(kind=kind, role=role, instance=instance, at=time.time(), values=values)
    subject = names.subject(bus.run, "metrics", kind, instance)
    await bus.client.publish(subject, encode(metric), headers={RUN_HEADER: bus.run})


def decode_metric(entry: LogEntry) -> Metric:
    return decode(entry.data, Metric)
