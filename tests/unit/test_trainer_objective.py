"""The loss of a microbatch and its metrics, by hand: what is multiplied, what is divided by, what is reported."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, Dppo, IcePop, Kl, M2po, Mis
from physarum.actors.trainer.algorithms.sequences import Sequences
from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.objective import Rows, microbatch_loss, step_metrics
from physarum.actors.trainer.off_policy import with_weights

LN2 = math.log(2)


def rows(logprobs: list[float], weight: float | None = None, **columns: list[float]) -> Rows:
    """All tokens of one sequence; the reduction is the token mean unless `weight` says otherwise."""
    count = len(logprobs)
    given = {"age": [0.0] * count, "engine": logprobs, "advantage": [1.0] * count, **columns}
    return Rows(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.full((count,), 0.5),
        weights=torch.full((count,), 1.0 / count if weight is None else weight),
        columns={name: torch.tensor(values) for name, values in given.items()},
        sequences=Sequences(torch.zeros(count, dtype=torch.int64), 1),
    )


def outcome(of: Rows, **settings: Any) -> tuple[float, dict[str, float], Tensor]:
    """(loss, metrics, gradient of the log-probabilities)."""
    loss, sums = microbatch_loss("rl", AlgorithmSettings(**{"correction": (), **settings}), of)
    (gradient,) = torch.autograd.grad(loss, of.logprobs)
    return float(loss.detach()), step_metrics("rl", {name: float(value) for name, value in sums.items()}), gradient


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """Five tokens, ratios 1, 1, 8, 8, 8 against the engine; IcePop rejects the three: -(1 + 1) / 5, not / 2."""
    of = rows([-1.0] * 5, engine=[-1.0, -1.0, *[-1.0 - 3 * LN2] * 3])
    loss, metrics, gradient = outcome(of, correction=(IcePop(),))
    assert loss == pytest.approx(-2 / 5)
    assert metrics["rejected"] == pytest.approx(3 / 5)
    assert gradient.tolist() == pytest.approx([-0.2, -0.2, 0, 0, 0])


def test_the_dual_clip_reaches_the_loss() -> None:
    """Ratio 8, advantage -1: the loss is 8 without it, 3 with c = 3, and its gradient is cut."""
    of = rows([-1.0], engine=[-1.0 - 3 * LN2], advantage=[-1.0])
    assert outcome(of, old_logprobs="engine")[0] == pytest.approx(8.0)
    loss, metrics, gradient = outcome(of, old_logprobs="engine", dual_clip=3.0)
    assert (loss, gradient.tolist(), metrics["dual_clip_share"]) == (pytest.approx(3.0), [0.0], 1.0)


def test_the_penalty_is_reported_as_it_is_not_as_it_is_weighed() -> None:
    """k2 of a difference of 0.2 is 0.02; with coefficient 10 the loss gains 0.2, the metric stays 0.02."""
    of = rows([-1.0], advantage=[0.0], reference=[-1.2])
    loss, metrics, gradient = outcome(of, kl=Kl(coef=10.0, kind="k2"))
    assert loss == pytest.approx(0.2)
    assert metrics["kl"] == pytest.approx(0.02)
    assert gradient.tolist() == pytest.approx([10 * 0.2])


def test_the_entropy_bonus_lowers_the_loss() -> None:
    assert outcome(rows([-1.0], advantage=[0.0]), entropy_coef=0.1)[0] == pytest.approx(-0.05)


def test_the_ratio_is_taken_against_what_the_option_says() -> None:
    """log p = -1; engine -1.5, proximal -1.25, kept -1.1; age 2: the line lies halfway between engine and proximal."""
    of = rows([-1.0], engine=[-1.5], proximal=[-1.25], kept=[-1.1], age=[2.0])
    found = {
        name: outcome(of, old_logprobs=name)[1]["ratio_mean"] for name in ("engine", "recompute", "kept", "interpolate")
    }
    expected = {"engine": 0.5, "recompute": 0.25, "kept": 0.1, "interpolate": 0.375}
    assert {name: math.log(ratio) for name, ratio in found.items()} == pytest.approx(expected, abs=1e-6)


def test_a_correction_sees_the_policy_before_the_update_not_the_one_in_training() -> None:
    """Probabilities 0.5 (engine), 0.5 (before) and 0.9 (now): DPPO judges 0.5 against 0.5."""
    of = rows([math.log(0.9)], engine=[math.log(0.5)], proximal=[math.log(0.5)])
    assert outcome(of, correction=(Dppo(),))[1]["rejected"] == 0.0
    assert outcome(rows([math.log(0.9)], engine=[math.log(0.5)]), correction=(Dppo(),))[1]["rejected"] == 1.0


def test_weights_of_the_whole_batch_take_the_place_of_the_microbatchs_own() -> None:
    of = rows([-1.0, -1.0], engine=[-9.0, -9.0], correction=[0.5, 0.0])
    loss, metrics, _ = outcome(of, correction=(IcePop(),))
    assert (loss, metrics["rejected"]) == (pytest.approx(-0.25), 0.5)


@pytest.mark.parametrize("old_logprobs", ["recompute", "engine", "interpolate", "kept"])
def test_whole_batch_weights_are_those_of_the_microbatch(old_logprobs: str) -> None:
    """A statistic of the whole batch that rejects nothing must change nothing: the same policies are compared."""
    columns = {"proximal": [-1.25, -0.5], "kept": [-1.1, -0.7], "age": [2.0, 1.0]}
    one = TrainSequence(
        token_ids=np.zeros(3, np.int32), prompt_len=1, loss_mask=np.ones(2, np.bool_),
        engine_logprobs=np.array([-1.5, -0.9], np.float32), advantage=1.0, execution=0,
        columns={name: np.array(values, np.float32) for name, values in columns.items()},
    )  # fmt: skip
    chosen: tuple[Any, ...] = (Mis(mode="clip", low=0.1, high=10.0),)
    settings = {"old_logprobs": old_logprobs, "correction": chosen}
    expected = outcome(rows([-1.0, -0.5], engine=[-1.5, -0.9], **columns), **settings)[0]
    (weighed,), sums = with_weights(
        AlgorithmSettings(**{**settings, "correction": (*chosen, M2po(threshold=1e6))}), [one]
    )
    given = {**columns, "correction": weighed.columns["correction"].tolist()}
    assert outcome(rows([-1.0, -0.5], engine=[-1.5, -0.9], **given), **settings)[0] == pytest.approx(expected)
    assert sums["mis_weight"] > 0 and sums["m2po_rejected"] == 0


def test_a_loss_of_ones_own_gets_log_probabilities_and_columns() -> None:
    assert outcome(rows([-1.0, -2.0]), loss=f"{__file__}:plain", hook_args={"factor": 3.0})[0] == pytest.approx(4.5)


def plain(logprobs: Tensor, columns: dict[str, Tensor], factor: float) -> Tensor:
    return -factor * logprobs * columns["advantage"]


def test_an_empty_microbatch_adds_nothing_and_has_every_name() -> None:
    """Ranks without tokens join the collectives: their sums must have the names of the others'."""
    settings = AlgorithmSettings(correction=(IcePop(),), kl=Kl(coef=0.1))
    empty = rows([], weight=0.0, reference=[])
    full = rows([-1.0], reference=[-1.0])
    _, nothing = microbatch_loss("rl", settings, empty)
    _, something = microbatch_loss("rl", settings, full)
    assert nothing.keys() == something.keys()
    assert all(float(value) == 0.0 for value in nothing.values())
