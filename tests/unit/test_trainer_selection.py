"""Selection bias by hand: 1 where everything is trained, less where long answers are not."""

from __future__ import annotations

import pytest

from physarum.actors.trainer.selection import Selection


def made(lengths: list[int]) -> Selection:
    selection = Selection()
    for length in lengths:
        selection.generated(length)
    return selection


def test_nothing_is_said_before_something_was_trained() -> None:
    assert Selection().metrics() == {}
    assert made([10]).metrics() == {}
    zero = made([0])
    zero.trained(0, 0)
    assert zero.metrics() == {}


def test_everything_trained_is_a_bias_of_none() -> None:
    selection = made([100] * 99 + [1000])
    for length in [100] * 99 + [1000]:
        selection.trained(length, length)
    assert selection.metrics() == pytest.approx({"length_ratio": 1, "tail_share_samples": 1, "tail_share_tokens": 1})


def test_a_rule_that_drops_the_longest_shows_in_all_three() -> None:
    """99 of 100 tokens and 1 of 1000: the mean generated is 109, the mean trained 100; of the longest none is trained."""
    selection = made([100] * 99 + [1000])
    for _ in range(99):
        selection.trained(100, 100)
    found = selection.metrics()
    assert found["length_ratio"] == pytest.approx(100 / 109)
    assert found["tail_share_samples"] == found["tail_share_tokens"] == 0


def test_a_rule_that_masks_half_of_the_longest_shows_in_tokens_alone() -> None:
    """500 of 1000: its share of the trained tokens is 500 / 10400, of the generated 1000 / 10900."""
    selection = made([100] * 99 + [1000])
    for _ in range(99):
        selection.trained(100, 100)
    selection.trained(1000, 500)
    found = selection.metrics()
    assert found["tail_share_samples"] == pytest.approx(1)
    assert found["tail_share_tokens"] == pytest.approx((500 / 10_400) / (1000 / 10_900))


def test_the_percentile_may_lie_inside_a_bucket() -> None:
    """All of one length: the longest 1 % are a hundredth of the one bucket, whatever is trained of it."""
    selection = made([64] * 50)
    for _ in range(10):
        selection.trained(64, 64)
    assert selection.metrics() == pytest.approx({"length_ratio": 1, "tail_share_samples": 1, "tail_share_tokens": 1})


def test_what_was_long_ago_is_forgotten() -> None:
    selection = Selection()
    for length in [1000] * 200_000 + [10] * 200_000:
        selection.generated(length)
    selection.trained(10, 10)
    assert selection.metrics()["length_ratio"] == pytest.approx(1, abs=0.05)
