"""From what a plan and other models say to an advantage per token, by hand-computed numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from physarum.actors.trainer.advantage import with_advantages
from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, Kl, Overlong, Shaping, Teacher
from physarum.actors.trainer.batch import TrainSequence, decode_sequences, encode_sequences
from physarum.actors.trainer.planned_advantages import planned_advantages, preferences, shaped


def sequence(mask: list[int], number: float, group: int = 0, **columns: list[float]) -> TrainSequence:
    trained = np.array(mask, np.bool_)
    return TrainSequence(
        token_ids=np.zeros(len(mask) + 1, np.int32),
        prompt_len=1,
        loss_mask=trained,
        engine_logprobs=np.where(trained, -1.0, np.nan).astype(np.float32),
        advantage=number,
        execution=0,
        group=group,
        columns={name: np.array(values, np.float32) for name, values in columns.items()},
    )


def advantages(sequences: list[TrainSequence], **settings: Any) -> list[list[float]]:
    found = with_advantages(AlgorithmSettings(**settings), sequences)
    return [pytest.approx(one.advantages().tolist(), abs=1e-6) for one in found]  # type: ignore[misc]


def test_the_plans_number_stands_on_every_trained_token() -> None:
    assert advantages([sequence([1, 0, 1], 0.5)], advantage="grpo") == [[0.5, 0.0, 0.5]]


def test_reinforce_plus_plus_is_the_return_whitened_over_the_batch() -> None:
    """Rewards 1 and 0 with gamma 0.5: returns (0.5, 1) and (0, 0). Mean 0.375; variance 0.6875 / 3."""
    batch = [sequence([1, 1], 1.0), sequence([1, 0, 1], 0.0)]
    plain = advantages(batch, advantage="reinforce++", gamma=0.5, whiten=False)
    assert plain == [[0.5, 1.0], [0.0, 0.0, 0.0]]
    first, second = advantages(batch, advantage="reinforce++", gamma=0.5)
    std = np.sqrt(0.6875 / 3 + 1e-8)
    assert first == [(0.5 - 0.375) / std, (1.0 - 0.375) / std]
    assert second == [-0.375 / std, 0.0, -0.375 / std]


def test_a_penalty_in_the_reward_is_taken_off_where_it_arises() -> None:
    """k1 = proximal - reference = (0.2, 0, 0.4), coefficient 0.5; reward 1 on the last token; gamma 1."""
    one = sequence([1, 0, 1], 1.0, proximal=[-1.0, 0.0, -1.0], reference=[-1.2, 0.0, -1.4])
    kl = Kl(coef=0.5, kind="k1", place="reward")
    found = advantages([one], advantage="reinforce++", kl=kl, whiten=False)
    assert found == [[1.0 - 0.1 - 0.2, 0.0, 1.0 - 0.2]]


def test_gae_gives_advantages_and_the_critics_targets() -> None:
    """Values (0.5, 0.5), reward 1, gamma 1, lambda 0.5: delta = (0, 0.5), A = (0.25, 0.5), returns (0.75, 1)."""
    one = sequence([1, 1], 1.0, value=[0.5, 0.5])
    (found,) = with_advantages(AlgorithmSettings(advantage="gae", lam=0.5, whiten=False), [one])
    assert found.advantages().tolist() == pytest.approx([0.25, 0.5])
    assert found.columns["return"].tolist() == pytest.approx([0.75, 1.0])


def test_each_turn_learns_from_its_own_return_within_its_group() -> None:
    """Scores (1, 0) and (0, 2), gamma 0.5: returns (1, 0) and (1, 2). Turn 0: both 1, so 0; turn 1: mean 1, so -1 and 1."""
    first = sequence([1, 0, 1], 1.0, turn=[0, -1, 1], turn_score=[1, 0, 0])
    second = sequence([1, 1, 0, 1], 2.0, turn=[0, 0, -1, 1], turn_score=[0, 0, 0, 2])
    found = advantages([first, second], advantage="turns", gamma=0.5, normalize_std=False)
    assert found == [[0.0, 0.0, -1.0], [0.0, 0.0, 0.0, 1.0]]


def test_turns_of_other_groups_are_not_compared() -> None:
    first = sequence([1], 1.0, group=0, turn=[0], turn_score=[1])
    second = sequence([1], 3.0, group=1, turn=[0], turn_score=[3])
    assert advantages([first, second], advantage="turns", normalize_std=False) == [[0.0], [0.0]]


def test_a_token_whose_age_took_its_gradient_gets_no_advantage() -> None:
    masked = sequence([0, 1], 1.0, turn=[0, 0], turn_score=[1, 1])
    other = sequence([1, 1], 0.0, turn=[0, 0], turn_score=[0, 0])
    found = advantages([masked, other], advantage="turns", normalize_std=False)
    assert found == [[0.0, 0.5], [-0.5, -0.5]]


def test_teachers_weigh_and_a_silent_one_is_left_out() -> None:
    """Teacher - student: a says (0.5, 0.1), b says (1, nothing); weights 1 and 3: (0.5 + 3) and 0.1 * 4 (renormalised)."""
    teachers = {"a": Teacher(model="x"), "b": Teacher(model="y", weight=3.0)}
    one = sequence([1, 1], 0.0, **{"proximal": [-1.0, -1.0], "teacher:a": [-0.5, -0.9], "teacher:b": [0.0, np.nan]})
    assert advantages([one], advantage="distillation", teachers=teachers) == [[3.5, 0.4]]


def test_the_reward_may_stand_beside_the_teachers() -> None:
    one = sequence([1], 2.0, **{"proximal": [-1.0], "teacher:a": [-0.5]})
    teachers = {"a": Teacher(model="x")}
    assert advantages([one], advantage="distillation", teachers=teachers, reward_weight=0.5) == [[0.5 + 1.0]]


def test_a_hook_makes_advantages_of_the_whole_batch() -> None:
    found = advantages([sequence([1, 0], 3.0)], advantage=f"{__file__}:doubled", hook_args={"by": 2.0})
    assert found == [[6.0, 0.0]]


def doubled(batch: Any, by: float) -> Any:
    return batch.planned * by


def test_plans_carry_what_each_advantage_is_made_of() -> None:
    """Rewards 1, 0, 0 of one group and 5, 5 of another."""
    rewards, groups = [1.0, 0.0, 0.0, 5.0, 5.0], ["a", "a", "a", "b", "b"]
    third = 1 / 3
    of = lambda name, std=False: planned_advantages("rl", name, rewards, groups, std)  # noqa: E731
    assert of("grpo") == pytest.approx([2 * third, -third, -third, 0.0, 0.0])
    assert of("rloo") == pytest.approx([1.0, -0.5, -0.5, 0.0, 0.0])
    assert of("reinforce++-baseline", True) == pytest.approx([2 * third, -third, -third, 0.0, 0.0])
    assert of("gae") == of("reinforce++") == of("turns") == of("my.module:hook") == rewards
    assert planned_advantages("sft", "grpo", rewards, groups, True) == [0.0] * 5
    assert planned_advantages("rl", "grpo", [], [], True) == []


def test_a_preference_is_the_best_against_the_worst_and_the_others_are_not_trained() -> None:
    assert preferences([0.5, 2.0, -1.0, 2.0], ["a"] * 4, [1] * 4, 2) == [None, 1.0, -1.0, None]
    assert preferences([1.0, 1.0], ["a", "a"], [1, 1], 2) == [None, None]
    assert preferences([0.0, 1.0], ["a", "a"], [1, 1], 2) == [-1.0, 1.0]


def test_rewards_are_shaped_before_they_are_compared() -> None:
    """(r - 0.5) * 2, at most 0.8; beyond 6 of 10 tokens a quarter less per token: 8 tokens cost 0.5, 12 cost 1."""
    shaping = Shaping(shift=-0.5, scale=2.0, bound=0.8, overlong=Overlong(max_tokens=10, buffer_tokens=4))
    assert shaped(shaping, [1.0, 0.5, 0.0], [6, 8, 12]) == pytest.approx([0.8, -0.5, -1.8])
    assert shaped(Shaping(), [1.0], [10**9]) == [1.0]


def test_declared_metadata_reaches_a_hook_unchanged_across_the_wire() -> None:
    declared = {"answer": {"kind": "number", "value": [1, 2.5, None]}, "missing": None}
    sent = msgspec.structs.replace(sequence([1, 1], 1.0), metadata=declared)
    (one,) = decode_sequences(encode_sequences([sent]))
    assert one.metadata == declared
    assert advantages([one], advantage=f"{__file__}:by_metadata") == [[2.5, 2.5]]


def by_metadata(batch: Any) -> Any:
    return batch.planned * batch.metadata[0]["answer"]["value"][1]
