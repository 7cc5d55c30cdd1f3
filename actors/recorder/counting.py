"""How much is recorded, and which of `stop:`'s conditions that meets. Pure but for the clock that its caller reads."""

from __future__ import annotations

import asyncio
import time

from physarum.actors.wire import read_header
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import RefillRecord, lineage
from physarum.bus.log import LogEntry
from physarum.configs.root import RootConfig


class Count:
    """Executions in the log, each counted once. `changed` is set whenever there may be more."""

    def __init__(self, config: RootConfig) -> None:
        self._config = config
        self._seen: dict[str, IntervalSet] = {}
        self.changed = asyncio.Event()
        self.refills: list[RefillRecord] = []
        self.samples_through = 0
        self.dead_through = 0
        self.executions = 0

    def samples(self, batch: list[LogEntry], through: int) -> None:
        """More of SAMPLES was read, up to sequence `through`."""
        for entry in batch:
            header = read_header(entry.headers)
            seen = self._seen.setdefault(lineage(header.source, header.attempt), IntervalSet())
            self.executions += seen.add(header.ordinal)
        self.samples_through = through
        if batch:
            self.changed.set()

    def dead(self, letters: int, through: int) -> None:
        """More of DEAD was read."""
        self.dead_through = through
        if letters:
            self.changed.set()

    def met(self, seconds: float) -> str | None:
        """The condition that is met after `seconds` of recording; `stop.steps` counts batches of executions."""
        stop, batch = self._config.stop, self._config.trainer.groups_per_batch * self._config.source.group_size
        if stop.samples is not None and self.executions >= stop.samples:
            return f"stop.samples = {stop.samples}"
        if stop.steps is not None and self.executions >= stop.steps * batch:
            return f"stop.steps = {stop.steps} batches of {batch} executions"
        if stop.time_s is not None and seconds >= stop.time_s:
            return f"stop.time_s = {stop.time_s:g}"
        return None

    def time_left_s(self, started: float) -> float | None:
        """Until `stop.time_s` is met; `started` in monotonic seconds."""
        limit_s = self._config.stop.time_s
        return None if limit_s is None else max(0.0, limit_s - (time.monotonic() - started))
