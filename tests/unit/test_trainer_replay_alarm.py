"""A replay that finds no record is said once, not trained over in silence."""

from __future__ import annotations

import logging

import pytest

from physarum.actors.trainer.replay_alarm import ReplayAlarm


def test_a_replay_without_records_is_reported_once_per_onset(caplog: pytest.LogCaptureFixture) -> None:
    alarm = ReplayAlarm()
    with caplog.at_level(logging.WARNING):
        for share in (0.0, 0.0, 0.5, 0.0):
            alarm.saw({"routing_replayed": share, "loss": 1.0})
    assert len(caplog.records) == 2
    assert "routed_experts" in caplog.text and "kept_tokens" not in caplog.text


def test_nothing_is_said_where_nothing_is_replayed(caplog: pytest.LogCaptureFixture) -> None:
    ReplayAlarm().saw({"loss": 0.0})
    assert not caplog.records
