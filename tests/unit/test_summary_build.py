"""The numbers of a run's summary, by hand."""

from __future__ import annotations

import msgspec
import pytest

from physarum.actors import states
from physarum.actors.account import close_account
from physarum.actors.model_maker import StartModel
from physarum.actors.summary import Facts, Tally, build, overlap_share, percentile, union
from physarum.bus.ledger import StepRecord
from physarum.bus.metrics import Metric


def step(number: int, start: float, end: float, wait_s: float = 0.0, ages: dict[int, int] | None = None) -> StepRecord:
    return StepRecord(
        epoch=1,
        number=number,
        plan=0,
        changed=True,
        trained=8,
        masked=0,
        tokens_trained=100,
        tokens_masked=0,
        ages=ages or {0: 100},
        multi_version_samples=2,
        reward_mean=0.5,
        wait_s=wait_s,
        started_at=start,
        finished_at=end,
    )


def metric(kind: str, **values: object) -> Metric:
    return Metric(kind=kind, role="r", instance="r-0", at=0.0, values=dict(values))


def score(value: float, at: float) -> states.EvalScore:
    return states.EvalScore(
        version="policy@1.0", score=value, problems=4, scored=4, off_version=0, started_at=at - 1, finished_at=at
    )


def test_union_joins_what_overlaps_or_touches() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7), (9, 8)]) == [(0, 4), (5, 6)]


def test_overlap_is_the_share_of_step_time_with_generation() -> None:
    # Steps [0, 10] and [20, 30]; generating [5, 22] and [29, 40]: 5 + 2 + 1 of 20.
    assert overlap_share([step(1, 0, 10), step(2, 20, 30)], [(5, 22), (29, 40)]) == pytest.approx(0.4)
    assert overlap_share([step(1, 0, 10)], []) is None
    assert overlap_share([], [(0, 1)]) is None


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_a_whole_run() -> None:
    tally = Tally()
    for one in (
        metric(
            "generation",
            tokens=300,
            intervals=[[100.0, 104.0], [103.0, 106.0]],
            replay={"aborted": {"times": 1, "interrupted": 100, "replayed": 1}},
        ),
        metric(
            "generation",
            tokens=200,
            intervals=[],
            replay={"aborted": {"times": 2, "interrupted": 300, "replayed": 2}},
        ),
        metric("publish", version="policy@1.0"),
        metric("publish", version="policy@1.1"),
        metric("publish", version="policy@1.1"),
        metric("swap", pause_s=0.1, transport="ipc"),
        metric("swap", pause_s=0.3, transport="disk"),
        metric("engine_start", seconds=40.0),
        metric("engine_start", seconds=30.0),
    ):
        tally.add(one)
    facts = Facts(
        # The first step waited since 70.0, but training began at 98.0: 2 s of that wait, then 1 s before the second.
        steps=[
            step(1, 100.0, 103.0, wait_s=30.0, ages={0: 60, 2: 40}),
            step(2, 104.0, 108.0, wait_s=1.0, ages={3: 0, 1: 5}),
        ],
        training_began_at=98.0,
        eval_start=score(0.25, 98.0),
        eval_end=score(0.75, 120.0),
        done=states.TrainerDone(reason="steps", version="policy@1.2", steps=2, model="/m", at=108.0),
        start_model=StartModel("made_by", "/s", 12.5, cached=True),
        age_bound=2,
    )
    summary = build(facts, tally, close_account({}, [], [], []))
    account = summary.pop("account")
    assert account["imbalance"] == 0
    assert summary == {
        "reward_start": 0.25,
        "reward_end": 0.75,
        "steps": 2,
        "versions": 2,
        "seconds": 10.0,
        "setup_seconds": {"sft": 12.5, "sft_cached": True, "engine_start": 40.0},
        "tokens_generated": 500,
        "tokens_trained": 0,
        "replay": {"aborted": {"times": 3, "interrupted": 400, "replayed": 3}},
        "trainer_wait_share": 0.3,
        "overlap_share": 0.7143,
        "age_bound": 2,
        "max_trained_age": 2,
        "freshness": {
            "masked_share": 0.0,
            "over_age_tokens": 0,
            "publish_debt_max": 0,
            "length_ratio": None,
            "tail_share_samples": None,
            "tail_share_tokens": None,
        },
        "multi_version_samples": 4,
        "pause_p50_s": 0.2,
        "pause_p99_s": 0.298,
        "weight_updates": {"ipc": 1, "disk": 1},
        "model_dir": "/m",
    }


def test_what_was_not_measured_is_null_and_never_a_guess() -> None:
    facts = Facts(
        steps=[], training_began_at=None, eval_start=None, eval_end=None, done=None, start_model=None, age_bound=2
    )
    summary = build(facts, Tally(), close_account({}, [], [], []))
    unknown = ("reward_start", "reward_end", "seconds", "tokens_generated", "overlap_share", "pause_p99_s", "versions")
    assert all(summary[name] is None for name in unknown)
    assert summary["setup_seconds"] == {"sft": None, "sft_cached": None, "engine_start": None}


def test_a_model_that_was_not_made_by_a_run_has_no_sft_time() -> None:
    facts = Facts(
        steps=[],
        training_began_at=None,
        eval_start=None,
        eval_end=None,
        done=None,
        start_model=StartModel("factory", "/s", 3.0),
        age_bound=0,
    )
    assert build(facts, Tally(), close_account({}, [], [], []))["setup_seconds"]["sft"] is None


def test_long_runs_keep_few_intervals() -> None:
    tally = Tally()
    for second in range(20_000):
        tally.add(metric("generation", tokens=1, intervals=[[float(second), second + 1.0]]))
    assert tally.generating == [(0.0, 20_000.0)]
    assert len(tally._generating) <= 4097


def test_what_the_age_policy_cost() -> None:
    """25 of 100 tokens masked; debts 0 and 2; the selection as the last step saw it."""
    first = msgspec.structs.replace(
        step(1, 0, 1), tokens_trained=40, tokens_masked=20, metrics={"publish_debt": 2.0, "over_age_tokens": 3.0}
    )
    second = msgspec.structs.replace(
        step(2, 1, 2), tokens_trained=35, tokens_masked=5, metrics={"publish_debt": 0.0, "length_ratio": 0.9}
    )
    facts = Facts(
        steps=[first, second],
        training_began_at=0.0,
        eval_start=None,
        eval_end=None,
        done=None,
        start_model=None,
        age_bound=1,
    )
    found = build(facts, Tally(), close_account({}, [], [], []))["freshness"]
    assert found == {
        "masked_share": 0.25,
        "over_age_tokens": 3,
        "publish_debt_max": 2,
        "length_ratio": 0.9,
        "tail_share_samples": None,
        "tail_share_tokens": None,
    }
