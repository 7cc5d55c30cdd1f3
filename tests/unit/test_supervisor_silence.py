"""Which actors count as silent, measured by the supervisor's own heartbeats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors.supervising import INSTANCE
from physarum.actors.supervisor import attendance
from physarum.actors.supervisor.attendance import Attendance
from physarum.actors.supervisor.silence import Silence
from physarum.bus.presence import Heartbeat
from physarum.configs.supervisor import SupervisorConfig


def ticks(silence: Silence, count: int) -> list[tuple[list[str], list[str]]]:
    return [silence.tick() for _ in range(count)]


def test_silence_is_warned_about_once_and_then_ends_in_a_kill() -> None:
    silence = Silence(heartbeat_s=2.0, limit_s=10.0)
    silence.heard("engine-0")
    told = ticks(silence, 16)
    assert [index for index, (suspicious, _) in enumerate(told, 1) if suspicious] == [5]  # 5 * 2 s = 10 s
    assert [index for index, (_, hung) in enumerate(told, 1) if hung] == [15]  # 15 * 2 s = 30 s


def test_a_heartbeat_ends_the_silence_and_says_whether_there_was_a_warning() -> None:
    silence = Silence(heartbeat_s=2.0, limit_s=10.0)
    assert silence.heard("a") is False
    ticks(silence, 4)
    assert silence.heard("a") is False
    ticks(silence, 5)
    assert silence.heard("a") is True
    assert ticks(silence, 4) == [([], [])] * 4


def test_nobody_is_silent_while_the_bus_is_away() -> None:
    """No heartbeat of ours comes back either, so nothing is counted, however much time passes."""
    silence = Silence(heartbeat_s=2.0, limit_s=10.0)
    silence.heard("a")
    assert silence.tick() == ([], [])


def test_an_actor_never_heard_or_ended_is_not_watched() -> None:
    silence = Silence(heartbeat_s=2.0, limit_s=2.0)
    silence.heard("a")
    silence.forget("a")
    assert ticks(silence, 20) == [([], [])] * 20


def test_own_heartbeats_that_waited_for_the_bus_make_nobody_look_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage they arrive at once, and before those of the actors."""
    clock = [0.0]
    monkeypatch.setattr(attendance.time, "monotonic", lambda: clock[0])
    hung: list[str] = []
    config = SupervisorConfig(heartbeat_s=1.0, heartbeat_limit_s=3.0)
    bus: Any = SimpleNamespace(run="r")
    mine = Attendance(bus, bus, config, hung.append, mine=lambda role, instance: instance != "far-0")

    def hear(role: str, instance: str, sequence: int) -> None:
        beat = Heartbeat(
            role=role, instance=instance, state="ready", pid=1, host="h", started_at=1.0, sequence=sequence
        )
        mine._on_beat(beat)

    hear("rollout", "rollout-0", 1)
    hear("rollout", "far-0", 1)
    for sequence in range(100):
        hear("supervisor", INSTANCE, sequence)
        hear("supervisor", "supervisor-gpu-0", sequence)
    assert hung == []
    for sequence in range(100, 110):
        clock[0] += 1.0
        hear("supervisor", INSTANCE, sequence)
    assert hung == ["rollout-0"], "the other machine's actors are its supervisor's affair"
