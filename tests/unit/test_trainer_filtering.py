"""Filters over headers: what passes, what is rejected, and that nothing loops for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from physarum.actors.errors import UnrecoverableError
from physarum.actors.trainer.filtering import Filters
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.configs.filters import FiltersConfig


def header(*rewards: float, status: str = "completed", trainable: int = 4) -> ExecutionHeader:
    """One execution with a sample per reward (fan-out)."""
    samples = [
        SampleHeader(
            tokens=8, response=trainable, trainable=trainable, reward=reward, status=status, spans=[], span_trainable=[]  # type: ignore[arg-type]
        )
        for reward in rewards
    ]  # fmt: skip
    return ExecutionHeader(
        execution="e", task="t", source="s", ordinal=0, group="g", group_size=2, member=0, attempt=0, tenant="", digest="",
        samples=samples,
    )  # fmt: skip


def filters(**settings: Any) -> Filters:
    return Filters(FiltersConfig.model_validate(settings))


def test_a_group_of_equal_rewards_is_not_informative() -> None:
    found = filters(groups="informative")
    assert not found.group([header(1.0), header(1.0)])
    assert found.group([header(1.0), header(0.0)])
    assert found.metrics() == {"filtered/informative": 1.0}


def test_every_filter_takes_fan_out_groups() -> None:
    """Two executions, one of them with three samples: 1, 0.5, 0 count once, as 0.5 (a peer's filters crashed on these)."""
    group = [header(1.0, 0.5, 0.0), header(0.5)]
    assert not filters(groups=["informative"]).group(group)
    assert filters(groups=[{"kind": "pass_rate", "low": 0.4, "high": 0.6}]).group(group)
    assert filters(executions=["completed", {"kind": "length", "max_tokens": 12}]).execution(group[0])
    assert not filters(executions=[{"kind": "length", "max_tokens": 11}]).execution(group[0])
    assert not filters(executions="completed").execution(header(1.0, status="truncated"))


def test_pass_rates_at_the_bounds_are_rejected() -> None:
    found = filters(groups=[{"kind": "pass_rate", "low": 0.0, "high": 1.0}])
    assert [found.group([header(a), header(b)]) for a, b in ((0, 0), (1, 0), (1, 1))] == [False, True, False]


def test_a_filter_that_lets_nothing_pass_ends_the_run_by_name() -> None:
    found = filters(groups="informative", max_rejected=3)
    same = [header(0.0), header(0.0)]
    assert [found.group(same) for _ in range(3)] == [False] * 3
    with pytest.raises(UnrecoverableError, match=r"filter informative rejected 4 groups .* \{'informative': 3\}"):
        found.group(same)


def test_or_the_next_group_is_kept_and_counted() -> None:
    found = filters(groups="informative", max_rejected=2, when_insufficient="keep")
    same = [header(0.0), header(0.0)]
    assert [found.group(same) for _ in range(6)] == [False, False, True, False, False, True]
    assert found.metrics() == {"filtered/informative": 4.0, "filtered_kept": 2.0}


def test_one_that_passes_begins_the_count_anew() -> None:
    found = filters(groups="informative", max_rejected=1)
    for _ in range(5):
        assert not found.group([header(0.0), header(0.0)])
        assert found.group([header(0.0), header(1.0)])


def test_a_hook_decides_over_headers() -> None:
    found = filters(groups=[{"kind": "hook", "hook": f"{__file__}:long_enough", "args": {"tokens": 9}}])
    assert found.group([header(0.0, trainable=5), header(0.0, trainable=4)])
    assert not found.group([header(0.0, trainable=4), header(0.0, trainable=4)])


def long_enough(headers: list[ExecutionHeader], tokens: int) -> bool:
    return bool(np.sum([one.trainable for one in headers]) >= tokens)
