"""What the live table and the plain lines show, from reports alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.console import Console

from physarum.actors.display import text
from physarum.actors.display.table import render, sparkline
from physarum.actors.display.view import ActorRow, Rate, RunView, actor_rows
from physarum.actors.supervisor.process import ActorRecord
from physarum.bus.metrics import Metric
from physarum.bus.presence import Heartbeat
from physarum.configs.root import RootConfig

CONFIG = RootConfig.model_validate(
    {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "source": {"hook": "a:b"},
        "stop": {"steps": 40},
        "trainer": {"objective": "sft", "lr": 1e-3},
    },
    strict=False,
)


def metric(kind: str, at: float, **values: Any) -> Metric:
    return Metric(kind=kind, role="r", instance="r-0", at=at, values=values)


def step(at: float, number: int, **values: Any) -> Metric:
    return metric(
        "step", at, number=number, reward_mean=0.5, loss=0.25, ages={0: 30, 1: 10}, executions=128, wait_s=1.0,
        seconds=3.0, **values
    )  # fmt: skip


def record(pid: int = 1) -> ActorRecord:
    return ActorRecord(
        role="rollout", instance="rollout-0", pid=pid, started_at=0.0, restarts=2, gpus=(3,), log="l", log_start=0
    )


def beat(pid: int, state: str = "ready", instance: str = "rollout-0", **numbers: float) -> Heartbeat:
    return Heartbeat(
        role="rollout", instance=instance, state=state, pid=pid, host="h", started_at=0.0, sequence=1, numbers=numbers
    )


def test_a_rate_is_the_mean_over_its_window_and_sinks_in_silence() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    rate.add(0.0, 100.0)
    rate.add(10.0, 50.0)
    assert rate.per_second(10.0) == 5.0  # the first amount only marks the beginning
    rate.add(20.0, 70.0)
    assert rate.per_second(20.0) == pytest.approx((50.0 + 70.0) / 15.0)
    assert rate.per_second(1000.0) == 0.0


def test_one_line_says_what_a_step_did() -> None:
    view = RunView(CONFIG)
    assert view.on_metric(metric("publish", 0.0, version="policy@1.3")) is False
    view.on_metric(metric("generation", 0.0, tokens=0, intervals=[]))
    view.on_metric(metric("generation", 10.0, tokens=12_000, intervals=[]))
    assert view.on_metric(step(0.0, 3)) and view.on_metric(step(10.0, 4))
    assert text.step_line(view, 10.0) == (
        "r: step 4/40  reward 0.500  loss 0.2500  version policy@1.3  age 0:30 1:10  12.8 samples/s  1.2k tokens/s"
        "  waited 1.0 s, step 3.0 s"
    )
    assert view.step is not None and view.step.wait_share == 0.25


def test_numbers_that_are_not_numbers_do_not_break_a_line() -> None:
    """The trainer's reward is NaN in a run without rewards."""
    assert text.facts({"reward": math.nan, "number": 3.0}) == "reward -  number 3"
    assert [text.amount(value) for value in (0.0, 12.25, 1234.0, 5e6, math.inf)] == ["0", "12.2", "1.2k", "5.0M", "-"]
    assert [text.duration(value) for value in (-1, 75, 3700)] == ["0:00", "1:15", "1:01:40"]


def test_rows_join_processes_with_their_own_heartbeats() -> None:
    rows = actor_rows([record(pid=2**22 + 1)], [beat(7, instance="far-0"), beat(99)])
    assert [(row.instance, row.state) for row in rows] == [("rollout-0", "restarting"), ("far-0", "ready")]
    (row,) = actor_rows([record(pid=5)], [beat(5, "draining", running=3.0)])
    assert row == ActorRow("rollout", "rollout-0", "draining", 5, 2, 0.0, (3,), 0.0, {"running": 3.0})


def test_the_table_shows_state_queues_reward_and_progress() -> None:
    view = RunView(CONFIG)
    view.on_metric(metric("eval", 0.0, version="policy@1.0", score=0.25, problems=4))
    view.on_metric(metric("eval", 0.0, version="policy@1.9", score=0.75, problems=4))
    view.on_metric(step(1.0, 10))
    view.actors = actor_rows([record(pid=5)], [beat(5)])
    view.depths = {"tasks": 12, "episodes": 0, "samples": 3400}
    console = Console(width=130)
    with console.capture() as capture:
        console.print(render(view, 100.0, 0.0))
    shown = capture.get()
    for words in ("r · sft · 1:40", "step 10/40", "0.250 -> 0.750", "TASKS 12", "SAMPLES 3.4k", "rollout-0", "ready"):
        assert words in shown, shown


def test_a_sparkline_scales_to_its_largest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([0.0]) == "▁"
