"""Engines that are kept for evaluations, and runs of an evaluation alone: who takes part, and what does not fit together."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors import roles
from physarum.actors.actorctl import eval as eval_command
from physarum.actors.policy_engines import evaluation_group, head_key, policy_group
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

RECIPE = """\
run: {name: r}
model: {made_by: other.yaml}
source: {hook: "physarum.agents.calculator.problems:Problems"}
rollout: {generate: "physarum.agents.calculator.episode:generate"}
reward: {hook: "physarum.agents.calculator.reward:exact_match"}
engines: {aside: {}, policy: {}, judge: {model: .}}
evaluation: {hook: "physarum.agents.calculator.problems:HeldOut"}
trainer: {objective: rl, lr: 1.0}
age: {admission: pace, consumption: wait}
stop: {steps: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    return path


def made(recipe: Path, *words: str) -> RootConfig:
    return resolve(recipe, parse_command_line(words))


def test_engines_that_are_kept_for_evaluations_answer_nothing_else(recipe: Path) -> None:
    assert policy_group(made(recipe)) == evaluation_group(made(recipe)) == "aside"
    kept = made(recipe, "evaluation.engines=aside")
    assert (policy_group(kept), evaluation_group(kept)) == ("policy", "aside")
    assert head_key(kept, "policy") == ("head", "policy")
    assert head_key(kept, "aside") == ("eval-head", "policy")
    assert head_key(made(recipe), "aside") == ("head", "policy")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.engines=asid"], "there are: aside, policy"),
        (["evaluation.engines=judge"], "a group under `engines` without `model`"),
        (
            ["evaluation.engines=aside", "engines.aside.transport=nccl"],
            "`engines.aside.transport: nccl` with `evaluation",
        ),
        (["evaluation.engines=aside", "engines.policy.model=m"], "the only group that follows versions"),
        (
            ["engines.policy.sglang.context-length=256", "rollout.sampling.max_new_tokens=256"],
            r"`rollout\.sampling\.max_new_tokens: 256` with `engines\.policy\.sglang\.context-length: 256`",
        ),
        (
            ["engines.policy.sglang.context-length=300", "evaluation.sampling={max_new_tokens: 400}"],
            "expected room for a prompt. Remedy: lower `evaluation.sampling.max_new_tokens`",
        ),
        (["evaluation.overflow=wait"], "`evaluation.overflow: wait` without `evaluation.engines`"),
        (["stop.evaluated=true"], "`stop.evaluated` without `trainer.record_only: true`"),
        (["stop.evaluated=true", "evaluation=null"], "`stop.evaluated` without `evaluation.at_start: true`"),
    ],
)
def test_what_does_not_fit_is_refused(recipe: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(recipe, *words)


def test_a_run_of_an_evaluation_alone_has_neither_source_nor_trainer(recipe: Path) -> None:
    config = resolve(recipe, [*parse_command_line(["model.path=m"]), *eval_command._EVALUATING])
    there = {role for role, _ in roles.instances(config)}
    assert {"evaluator", "recorder", "engine", "rollout", "reward", "checkpoint"} <= there
    assert not {"source", "trainer"} & there
    assert config.evaluation is not None and not config.evaluation.at_end


def test_one_model_is_scored(tmp_path: Path) -> None:
    chosen = eval_command._model(Path("m"), None, None, tmp_path, tmp_path / "r-eval")
    assert chosen == Path("m").absolute()
    assert eval_command._model(None, None, None, tmp_path, tmp_path / "r-eval") is None
    for model, run, checkpoint in ((Path("m"), "r", None), (None, None, "5")):
        with pytest.raises(ConfigError, match="expected one model"):
            eval_command._model(model, run, checkpoint, tmp_path, tmp_path / "r-eval")
