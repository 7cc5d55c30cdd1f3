"""The run's metrics as they come, and the reports that were made before anybody listened here.

METRICS lives in the server's memory and for an hour; a listener that was here from the start needs neither. What is
found there at the start (a supervisor that took over a run) comes first, then every report, each once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection

from nats.aio.msg import Msg

from physarum.bus import log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError, CodecError
from physarum.bus.metrics import Metric, decode_metric
from physarum.bus.names import RUN_HEADER

_log = logging.getLogger(__name__)

Listener = Callable[[Metric], None]


class MetricsFeed:
    """Calls every listener with every metric, but those of the instances `aside`. Add listeners before `open`."""

    def __init__(self, bus: Bus, listeners: list[Listener], aside: Collection[str] = ()) -> None:
        self._bus = bus
        self._listeners, self._aside = listeners, aside
        self._early: list[Metric] | None = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[MetricsFeed]:
        subscription = await self._bus.subscribe(names.all_subjects(self._bus.run, "metrics"), self._on_message)
        try:
            await self._catch_up()
            yield self
        finally:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def _catch_up(self) -> None:
        """Subscribed first and read then, so nothing falls between; what both saw is given once."""
        try:
            stored = [decode_metric(entry) for entry in await log.scan(self._bus, "metrics")]
        except (BusError, CodecError) as error:
            _log.warning("earlier metrics cannot be read: %s", error)
            stored = []
        seen = {(metric.instance, metric.kind, metric.at) for metric in stored}
        early, self._early = self._early or [], None
        for metric in stored:
            self._give(metric)
        for metric in early:
            if (metric.instance, metric.kind, metric.at) not in seen:
                self._give(metric)

    async def _on_message(self, message: Msg) -> None:
        if not self._bus.accept(dict(message.headers or {}), RUN_HEADER):
            return
        try:
            metric = decode(message.data, Metric)
        except CodecError as error:
            _log.warning("unreadable metric on %s: %s", message.subject, error)
            return
        if self._early is not None:
            self._early.append(metric)
        else:
            self._give(metric)

    def _give(self, metric: Metric) -> None:
        for listener in self._listeners if metric.instance not in self._aside else ():
            listener(metric)
