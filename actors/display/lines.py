"""For logs and pipes: one plain line for each training step, evaluation and change of an actor's state."""

from __future__ import annotations

import asyncio
import time
from typing import Final, TextIO

from physarum.actors.display.machines import machine_rows, machines_text
from physarum.actors.display.text import step_line
from physarum.actors.display.view import RunView
from physarum.actors.supervisor.live import LiveRun
from physarum.bus.metrics import Metric
from physarum.configs.root import RootConfig

_PERIOD_S: Final = 1.0


class PlainLines:
    """Observer for anything that is not a terminal."""

    def __init__(self, stream: TextIO, config: RootConfig) -> None:
        self._stream = stream
        self._view = RunView(config)
        self._states: dict[str, str] = {}
        self._machines = ""

    def on_metric(self, metric: Metric) -> None:
        if self._view.on_metric(metric):
            self._write(step_line(self._view, time.time()))
        elif metric.kind == "eval":
            values = metric.values
            problems = values.get("problems")
            self._write(
                f"{self._view.name}: held-out {values['score']:.3f} at {values['version']} ({problems} problems)"
            )

    async def observe(self, run: LiveRun) -> None:
        while True:
            states = {beat.instance: beat.state for beat in run.heartbeats() if beat.role != "supervisor"}
            for instance, state in states.items():
                if self._states.get(instance) != state:
                    self._write(f"{self._view.name}: {instance} is {state}")
            self._states = states
            machines = machines_text(machine_rows(run.config, run.heartbeats()))
            if machines != self._machines:
                self._write(f"{self._view.name}: machines {machines}")
            self._machines = machines
            await asyncio.sleep(_PERIOD_S)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
