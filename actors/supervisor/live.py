"""What a watcher of a run is given: a view of it, and no way to change it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from physarum.actors.context import RunFolder
from physarum.actors.supervisor.process import ActorRecord
from physarum.bus.connection import Bus
from physarum.bus.metrics import Metric
from physarum.bus.presence import Heartbeat
from physarum.configs.root import RootConfig


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that is under way. `records`: the processes of this machine; `heartbeats`: everybody's newest."""

    config: RootConfig
    folder: RunFolder
    bus: Bus
    records: Callable[[], list[ActorRecord]]
    heartbeats: Callable[[], list[Heartbeat]]


class Observer(Protocol):
    """Shows a run. An observer that fails is logged and does not end the run."""

    def on_metric(self, metric: Metric) -> None:
        """Called with every metric, from the event loop; must not block."""

    async def observe(self, run: LiveRun) -> None:
        """Runs from the start of the actors until it is cancelled."""
