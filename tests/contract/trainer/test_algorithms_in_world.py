"""Algorithms in a real Megatron world: what is asked of other models, in which order, and what it does to the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from physarum.actors.trainer.algorithm_settings import (
    AgeWeight,
    AlgorithmSettings,
    Critic,
    Dppo,
    IcePop,
    Kl,
    M2po,
    Mis,
    Opsm,
    Reference,
    Rule,
    Teacher,
    Tis,
)
from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.errors import EmptyBatch, UnsupportedModel
from physarum.actors.trainer.world import World, WorldConfig

pytestmark = pytest.mark.timeout(120)

Folder = Callable[..., Path]
Batch = Callable[..., list[TrainSequence]]
Start = Callable[[WorldConfig], World]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a world; one at a time in a process, so the one before is closed."""
    running: list[World] = []

    def begin(settings: WorldConfig) -> World:
        if running:
            running.pop().close()
        running.append(World.start(settings))
        return running[0]

    yield begin
    for world in running:
        world.close()


def config(folder: Path, **settings: Any) -> WorldConfig:
    objective = settings.pop("objective", "rl")
    return WorldConfig(hf_folder=str(folder), lr=3e-3, objective=objective, algorithm=AlgorithmSettings(**settings))


def on_policy(world: World, batch: list[TrainSequence]) -> list[TrainSequence]:
    """The batch as an engine with these very weights would have made it."""
    return [
        replace(one, engine_logprobs=np.where(np.isnan(one.engine_logprobs), np.nan, own).astype(np.float32))
        for one, own in zip(batch, world.logprobs(batch), strict=True)
    ]


def aged(batch: list[TrainSequence], age: int) -> list[TrainSequence]:
    return [one.with_columns(age=np.full(one.response_len, age, np.float32)) for one in batch]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"correction": (Mis(level="sequence", normalize=True, veto=1e-4),)},
        {
            "correction": (
                Mis(level="geometric", high=Rule(by_age=(2.0, 1.1))),
                Opsm(),
                AgeWeight(weight=Rule(base=1.0)),
            )
        },
        {"correction": (IcePop(), Dppo(), M2po())},
        {"old_logprobs": "kept", "correction": (Tis(cap=Rule(base=1.0, decay=0.5, offset=1.0)),)},
        {"old_logprobs": "interpolate", "correction": ()},
        {"old_logprobs": "interpolate", "correction": (Mis(normalize=True), M2po())},
        {"loss": "gspo", "reduction": "sequence"},
        {"loss": "gspo-token", "clip_low": 1e-3, "clip_high": 1e-3},
        {"loss": "sapo"},
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        {"kl": Kl(coef=0.5), "entropy_coef": 0.01},
        {"kl": Kl(coef=0.5, kind="unbiased")},
    ],
    ids=lambda settings: "-".join(str(value)[:20] for value in settings.values()) or "default",
)
def test_on_policy_every_algorithm_takes_the_plain_policy_gradients_first_step(
    start: Start, model_folder: Folder, make_batch: Batch, settings: dict[str, Any]
) -> None:
    """Ratio exactly 1, weights exactly 1, penalty exactly 0: gradient norms are those of REINFORCE (entropy apart)."""
    plain = start(config(model_folder(), correction=()))
    batch = on_policy(plain, make_batch())
    reduction = settings.get("reduction", "token")
    expected = start(config(model_folder(), correction=(), reduction=reduction)).step(batch)
    found = start(config(model_folder(), **settings)).step(aged(batch, 0))
    assert found.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert found.metrics.get("rejected", 0.0) == 0
    assert found.metrics.get("kl", 0.0) == pytest.approx(0.0, abs=1e-9)
    if "entropy_coef" not in settings and settings.get("loss") != "gspo":
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_the_first_step_has_ratio_exactly_one(start: Start, model_folder: Folder, make_batch: Batch) -> None:
    """Whatever the engine reported: the old policy is the trainer's own."""
    assert start(config(model_folder())).step(make_batch()).metrics["ratio_mean"] == 1.0


def test_a_correction_over_the_whole_batch_does_not_depend_on_microbatches(
    start: Start, model_folder: Folder, make_batch: Batch
) -> None:
    settings = {"correction": (Mis(level="geometric", normalize=True, low=0.2, high=5.0), M2po(threshold=1.0))}
    whole = start(config(model_folder(), **settings)).step(make_batch())
    small = replace(config(model_folder(), **settings), tokens_per_microbatch=64)
    split = start(small).step(make_batch())
    assert whole.metrics["rejected"] == split.metrics["rejected"]
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)


def test_minibatches_are_optimizer_steps_against_one_old_policy(
    start: Start, model_folder: Folder, make_batch: Batch
) -> None:
    batch = [replace(one, group=index // 4) for index, one in enumerate(make_batch())]
    found = start(config(model_folder(), minibatches=3)).step(batch)
    assert found.metrics["ratio_mean"] != 1.0, "later minibatches have left the old policy"
    assert found.metrics["tokens"] == sum(one.trained_tokens for one in batch)


def test_kept_weights_give_the_log_probabilities_of_the_version_that_made_each_token(
    start: Start, model_folder: Folder, make_batch: Batch
) -> None:
    """Tokens of two versions ago under the kept weights are what an engine with version 0 would have reported."""
    kept = config(model_folder(), old_logprobs="kept", correction=())
    engine = config(model_folder(), old_logprobs="engine", correction=())
    world = start(engine)
    batch = on_policy(world, make_batch())  # by version 0
    found = []
    for chosen in (kept, engine):
        world = start(chosen)
        found.append([world.step(aged(batch, number - 1), number=number) for number in (1, 2, 3)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.metrics["ratio_mean"] == pytest.approx(theirs.metrics["ratio_mean"], rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert abs(found[0][-1].metrics["ratio_mean"] - 1.0) > 1e-3


@pytest.mark.parametrize("update_every", [None, 1])
def test_the_reference_stays_or_follows(
    start: Start, model_folder: Folder, make_batch: Batch, update_every: int | None
) -> None:
    world = start(config(model_folder(), kl=Kl(coef=0.1), reference=Reference(update_every=update_every)))
    first, second = (world.step(make_batch()).metrics["kl"] for _ in range(2))
    assert first == 0.0
    assert second > 0.0 if update_every is None else second == 0.0


def test_a_moving_reference_is_part_of_the_state(
    start: Start, model_folder: Folder, make_batch: Batch, tmp_path: Path
) -> None:
    chosen = config(model_folder(), kl=Kl(coef=0.1), reference=Reference(update_every=2))
    world = start(chosen)
    for number in (1, 2, 3):
        world.step(make_batch(seed=number), number=number)
    world.save(tmp_path)
    expected = world.step(make_batch(seed=4), number=4)
    resumed = start(chosen)
    resumed.load(tmp_path)
    found = resumed.step(make_batch(seed=4), number=4)
    assert found.metrics["kl"] == expected.metrics["kl"] > 0
    assert found.grad_norm == expected.grad_norm


def test_a_critic_learns_the_returns_and_its_state_is_kept(
    start: Start, model_folder: Folder, make_batch: Batch, tmp_path: Path
) -> None:
    chosen = config(model_folder(), advantage="gae", lam=0.95, critic=Critic(lr=3e-2, clip=10.0))
    world = start(chosen)
    batch = make_batch()
    seen = [world.step(batch, number=number).metrics for number in range(1, 13)]
    assert seen[-1]["critic_loss"] < 0.7 * seen[0]["critic_loss"]
    assert seen[-1]["explained_variance"] > seen[0]["explained_variance"]
    world.save(tmp_path)
    assert all(path.is_file() for path in tmp_path.iterdir()), "a checkpoint is digested file by file, without folders"
    expected = world.step(batch, number=13)
    resumed = start(chosen)
    resumed.load(tmp_path)
    found = resumed.step(batch, number=13)
    assert found.metrics["critic_loss"] == expected.metrics["critic_loss"]
    assert found.grad_norm == expected.grad_norm


def test_a_critic_warms_up_while_the_policy_waits(start: Start, model_folder: Folder, make_batch: Batch) -> None:
    world = start(config(model_folder(), advantage="gae", critic=Critic(warmup_steps=2)))
    before = {name: tensor.clone() for name, tensor in world.export()}
    assert not world.step(make_batch()).changed
    assert world.step(make_batch()).tokens_trained == 0
    assert all(bool((tensor == before[name]).all()) for name, tensor in world.export())
    result = world.step(make_batch())
    assert result.changed and result.grad_norm > 0
    assert any(bool((tensor != before[name]).any()) for name, tensor in world.export())


@pytest.mark.parametrize("advantage", ["reinforce++", "reinforce++-baseline", "rloo"])
def test_advantages_of_returns_are_whitened_over_the_batch(
    start: Start, model_folder: Folder, make_batch: Batch, advantage: str
) -> None:
    penalty = Kl(coef=0.01, kind="k1", place="reward") if advantage == "reinforce++" else Kl()
    found = start(config(model_folder(), advantage=advantage, kl=penalty)).step(make_batch())
    assert np.isfinite(found.loss) and found.grad_norm > 0


def test_a_student_comes_nearer_to_its_teacher(start: Start, model_folder: Folder, make_batch: Batch) -> None:
    teacher, batch = model_folder(tied=False), make_batch()
    wanted = start(WorldConfig(hf_folder=str(teacher), objective="sft")).logprobs(batch)
    world = start(config(model_folder(), advantage="distillation", teachers={"t": Teacher(model=str(teacher))}))

    def distance() -> float:
        own = world.logprobs(batch)
        pairs = zip(own, wanted, batch, strict=True)
        return float(np.mean(np.concatenate([(a - b)[one.loss_mask] ** 2 for a, b, one in pairs])))

    before = distance()
    for _ in range(12):
        world.step(on_policy(world, batch))
    assert distance() < before


def test_a_teacher_of_another_vocabulary_is_refused_by_name(start: Start, model_folder: Folder) -> None:
    other = Teacher(model=str(model_folder(vocabulary=80)))
    with pytest.raises(UnsupportedModel, match=r"teacher big .* has 80 token ids, the policy"):
        start(config(model_folder(), advantage="distillation", teachers={"big": other}))


def test_preferences_are_learnt_from_pairs(start: Start, model_folder: Folder, make_batch: Batch) -> None:
    """The better one of each group against the worse one; whole pairs share a microbatch."""
    batch = [
        replace(one, group=index // 2, advantage=1.0 - 2.0 * (index % 2)) for index, one in enumerate(make_batch())
    ]
    chosen = replace(config(model_folder(), objective="dpo"), tokens_per_microbatch=128)
    world = start(chosen)
    seen = [world.step(batch).metrics for _ in range(8)]
    assert seen[0]["margin"] == pytest.approx(0.0, abs=1e-6)
    assert seen[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert seen[-1]["margin"] > 0.05 and seen[-1]["loss"] < seen[0]["loss"]
    assert seen[-1]["pairs_right"] == 1.0
    with pytest.raises(EmptyBatch, match="no pair"):
        world.step([one for one in batch if float(one.advantages()[0]) > 0])


def test_the_entropy_bonus_has_a_gradient(start: Start, model_folder: Folder, make_batch: Batch) -> None:
    """Without advantages nothing else moves: entropy rises."""
    world = start(config(model_folder(), entropy_coef=1.0, correction=()))
    batch = [replace(one, advantage=0.0) for one in make_batch()]
    seen = [world.step(batch).metrics["entropy"] for _ in range(4)]
    assert seen == sorted(seen) and seen[-1] > seen[0] + 0.01


def test_an_optimizer_reset_makes_the_step_that_a_fresh_one_makes(
    start: Start, model_folder: Folder, make_batch: Batch, tmp_path: Path
) -> None:
    """From the weights after version 2 the step to 3 is the first of a new optimizer."""
    chosen = replace(config(model_folder()), optimizer_resets=(2,))
    world = start(chosen)
    for number in (1, 2):
        world.step(make_batch(seed=number), number=number)
    world.save_hf(tmp_path / "two")
    world.step(make_batch(seed=3), number=3)
    reset = {name: tensor.clone() for name, tensor in world.export()}
    fresh = start(config(tmp_path / "two"))
    fresh.step(make_batch(seed=3), number=3)
    for name, tensor in fresh.export():
        np.testing.assert_allclose(reset[name], tensor, atol=1e-7, err_msg=name)


def test_a_reference_that_cannot_become_the_policy_is_refused_at_the_start(start: Start, model_folder: Folder) -> None:
    reference = Reference(model=str(model_folder(tied=False)), update_every=1)
    with pytest.raises(UnsupportedModel, match=r"reference.model has output_layer.weight of shape .* the policy None"):
        start(config(model_folder(), kl=Kl(coef=0.1), reference=reference))


def test_a_loss_hook_gets_declared_metadata_and_knows_whose_each_row_is(
    start: Start, model_folder: Folder, make_batch: Batch
) -> None:
    """Sequences that say so are left out: the others alone give the same gradient."""
    batch = [replace(one, metadata={"use": index % 2 == 0}) for index, one in enumerate(make_batch())]
    chosen = config(
        model_folder(), loss=f"{__file__}:of_those_used", correction=(), reduction="constant", constant_tokens=8
    )
    found = start(replace(chosen, tokens_per_microbatch=64)).step(batch)
    used = [replace(one, advantage=one.advantage if one.metadata["use"] else 0.0) for one in batch]
    expected = start(replace(chosen, algorithm=replace(chosen.algorithm, loss="ppo"))).step(used)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def of_those_used(logprobs: Any, columns: dict[str, Any]) -> Any:
    use = torch.tensor([one["use"] for one in columns["metadata"]])[columns["sequence"]]
    return -logprobs * columns["advantage"] * use
