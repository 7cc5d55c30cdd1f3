"""The alarm on growing mismatch: by hand-made series."""

from __future__ import annotations

import logging

import pytest

from physarum.actors.trainer.mismatch_alarm import MismatchAlarm


def verdicts(values: list[float], window: int = 4, doubling_steps: float = 2.0) -> list[float]:
    alarm = MismatchAlarm(window, doubling_steps)
    return [alarm.saw({"kl_k3": value})["mismatch_growing"] for value in values]


def test_what_doubles_with_every_step_is_growing_and_what_stays_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = verdicts([0.001, 0.001, 0.001, 0.001, 0.002, 0.004, 0.008, 0.008, 0.008, 0.008])
    assert found == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0]
    assert [record.getMessage()[:36] for record in caplog.records] == ["the mismatch between engine and trai"], "once"


def test_growth_that_is_slow_enough_is_let_be() -> None:
    assert verdicts([0.001 * 1.2**step for step in range(8)]) == [0] * 8


def test_rounding_is_no_drift() -> None:
    assert verdicts([1e-9 * 2**step for step in range(8)]) == [0] * 8


def test_a_step_without_a_mismatch_says_nothing() -> None:
    assert MismatchAlarm(4, 2.0).saw({"loss": 1.0}) == {}
