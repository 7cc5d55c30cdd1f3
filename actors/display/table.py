"""The live table of a terminal: a progress bar, what the run learns, its queues, and each actor on a line."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from physarum.actors.display.depths import depths
from physarum.actors.display.machines import machine_rows, machines_text
from physarum.actors.display.text import STATE_STYLES, amount, duration, facts, number
from physarum.actors.display.view import ActorRow, RunView, actor_rows
from physarum.actors.supervisor.live import LiveRun
from physarum.bus.metrics import Metric
from physarum.configs.root import RootConfig

_PERIOD_S: Final = 1.0
"""The table shows running clocks, so it is drawn anew each second."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


class LiveTable:
    """Observer for a terminal."""

    def __init__(self, console: Console, config: RootConfig) -> None:
        self._console = console
        self._view = RunView(config)
        self._began_at = time.time()

    def on_metric(self, metric: Metric) -> None:
        self._view.on_metric(metric)

    async def observe(self, run: LiveRun) -> None:
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while True:
                self._view.actors = actor_rows(run.records(), run.heartbeats())
                self._view.machines = machines_text(machine_rows(run.config, run.heartbeats()))
                self._view.depths = await depths(run.bus)
                live.update(render(self._view, time.time(), self._began_at), refresh=True)
                await asyncio.sleep(_PERIOD_S)


def render(view: RunView, now: float, began_at: float) -> RenderableType:
    """The whole picture at `now` (Unix seconds)."""
    title = f"physarum · {view.name} · {view.objective} · {duration(now - began_at)}"
    return Panel(Group(_bar(view), _training(view, now), _queues(view), _actors(view.actors, now)), title=title)


def _bar(view: RunView) -> RenderableType:
    done, total = view.progress
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(ratio=1)
    line.add_column(justify="right")
    line.add_row(ProgressBar(total=total, completed=done, pulse=total is None), f"step {done}/{total or '?'}")
    return line


def _training(view: RunView, now: float) -> RenderableType:
    step = view.step
    cells = {
        "version": view.version or "-",
        "reward": number(step.reward if step else None),
        "held-out": _score(view),
        "loss": number(step.loss if step else None, 4),
        "age max/bound": f"{step.max_age if step and step.max_age is not None else '-'}/{view.age_bound}",
        "samples/s": amount(round(view.samples_per_s(now), 1)),
        "tokens/s": amount(round(view.tokens_per_s(now), 1)),
        "trainer waits": f"{100 * step.wait_share:.0f} %" if step else "-",
    }
    table = Table(box=None, expand=True, header_style="dim")
    for name in cells:
        table.add_column(name)
    table.add_row(*cells.values())
    return Group(table, Text(" reward " + sparkline(view.rewards), style="green")) if view.rewards else table


def _score(view: RunView) -> str:
    if view.score is None:
        return "-"
    _, score = view.score
    changed = view.score_start is not None and view.score_start != score
    return f"{number(view.score_start)} -> {score:.3f}" if changed else f"{score:.3f}"


def _queues(view: RunView) -> RenderableType:
    shown = "   ".join(f"{name.upper()} {amount(count)}" for name, count in view.depths.items())
    machines = f"\n machines  {view.machines}" if view.machines else ""
    return Text(f" queues  {shown or '-'}{machines}", style="dim")


def _actors(actors: list[ActorRow], now: float) -> RenderableType:
    table = Table(box=None, expand=True, header_style="dim")
    for name in ("actor", "state", "up", "restarts", "gpus", "lag", "numbers"):
        table.add_column(name, no_wrap=True, ratio=1 if name == "numbers" else None)
    for row in actors:
        table.add_row(
            row.instance,
            Text(row.state, style=STATE_STYLES.get(row.state, "")),
            duration(now - row.started_at),
            str(row.restarts) if row.restarts else "",
            ",".join(map(str, row.gpus)),
            "-" if row.lag_s is None else f"{1000 * row.lag_s:.0f} ms",
            facts(row.numbers),
        )
    return table


def sparkline(values: list[float], width: int = 60) -> str:
    """The last `width` values between 0 and the largest, as blocks."""
    shown = values[-width:]
    top = max([*shown, 1e-9])
    return "".join(_BLOCKS[min(7, max(0, int(8 * value / top)))] for value in shown)
