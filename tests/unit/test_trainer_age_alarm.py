"""A run whose engines never take a version masks batch after batch: it says so, and what it was doing."""

from __future__ import annotations

import logging

import pytest

from physarum.actors.trainer.age_alarm import AgeAlarm
from physarum.bus.ledger import StepRecord


def step(trained: int, masked: int) -> StepRecord:
    return StepRecord(
        epoch=1, number=1, plan=1, changed=trained > 0, trained=trained, masked=4 - trained, tokens_trained=trained,
        tokens_masked=masked, ages={}, multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=1.0,
    )  # fmt: skip


def test_batches_that_are_masked_whole_are_reported_once_per_onset(caplog: pytest.LogCaptureFixture) -> None:
    alarm = AgeAlarm(2)
    with caplog.at_level(logging.WARNING):
        for trained in (0, 0, 0, 0, 0, 3, 0, 0, 0, 0):
            alarm.saw(step(trained, 5), "broadcast of policy@1.2 for 63 s")
    assert len(caplog.records) == 2
    assert "age.bound = 2" in caplog.text and "broadcast of policy@1.2 for 63 s" in caplog.text


def test_single_ones_and_empty_batches_are_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    alarm = AgeAlarm(2)
    for trained, masked in ((0, 5), (0, 5), (3, 5), (0, 0), (0, 0), (0, 0), (0, 5)):
        alarm.saw(step(trained, masked), "nothing")
    assert not caplog.records
