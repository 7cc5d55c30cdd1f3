"""Denominators over the whole batch, against numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.trainer.algorithms.reduction import Reduction, sequence_weights, weighted_sum


def test_token_mean_counts_every_token_the_same() -> None:
    assert sequence_weights([3, 1], [0, 1], "token-mean") == [0.25, 0.25]


def test_several_samples_of_one_execution_count_it_once() -> None:
    # execution 0: 2 + 4 tokens in two samples, execution 1: 3 tokens; two executions
    assert sequence_weights([2, 4, 3], [0, 0, 1], "execution-mean") == pytest.approx([1 / 12, 1 / 12, 1 / 6])


def test_an_execution_without_trained_tokens_is_not_in_the_mean() -> None:
    assert sequence_weights([0, 5], [0, 1], "execution-mean") == [0.0, 0.2]


def test_a_batch_without_trained_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 2 sequences"):
        sequence_weights([0, 0], [0, 1], "token-mean")


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=1).filter(
        lambda items: any(t for t, _ in items)
    ),
    st.sampled_from(["token-mean", "execution-mean"]),
)
def test_weights_times_tokens_add_up_to_one(items: list[tuple[int, int]], reduction: Reduction) -> None:
    tokens = [count for count, _ in items]
    weights = sequence_weights(tokens, [execution for _, execution in items], reduction)
    assert sum(count * weight for count, weight in zip(tokens, weights, strict=True)) == pytest.approx(1.0)


def test_weighted_sum_ignores_what_is_masked() -> None:
    values = torch.tensor([2.0, float("nan"), 4.0], requires_grad=True)
    total = weighted_sum(values, torch.tensor([True, False, True]), torch.tensor([0.5, 0.5, 0.25]))
    total.backward()
    assert float(total.detach()) == 2.0
    assert values.grad is not None and values.grad.tolist() == [0.5, 0.0, 0.25]
