"""Generated problems: a position defines its row, no training problem is held out, and scorers accept their own answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from physarum.agents.environments.reasoning_gym import HeldOut, Problems, held_out, open_dataset, score
from physarum.bus.codec import decode, encode
from physarum.bus.records import Execution, Sample, Task
from physarum.configs.checks.imports import check_hooks
from physarum.configs.errors import HookError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

gym = pytest.importorskip("reasoning_gym")

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 40}


def rows(problems: Problems, epoch: int) -> list[dict[str, Any]]:
    return [problems.row(epoch, index) for index in range(len(problems))]


def test_a_position_defines_its_row_and_epochs_bring_new_problems() -> None:
    problems = Problems(3, name="chain_sum", args=SMALL)
    first, second = rows(problems, 0), rows(problems, 1)
    assert len(first) == 40
    again = Problems(3, name="chain_sum", args=SMALL)
    assert [again.row(epoch, index) for epoch, index in ((1, 39), (0, 5), (1, 0))] == [second[39], first[5], second[0]]
    assert first != second
    assert first != rows(Problems(4, name="chain_sum", args=SMALL), 0)


def test_training_and_held_out_problems_are_disjoint_however_few_there_are() -> None:
    """Two terms of one digit: 200 questions in all, each of which training meets."""
    problems, apart = Problems(0, name="chain_sum", args=SMALL), HeldOut(0, name="chain_sum", args=SMALL, problems=8)
    trained = {row["prompt"] for epoch in range(30) for row in rows(problems, epoch)}
    kept = [apart.row(0, index)["prompt"] for index in range(len(apart))]
    assert len(set(kept)) == 8
    assert all(map(held_out, kept)) and not trained & set(kept)
    assert len(trained) > 150
    with pytest.raises(Exception, match=r"chain_sum gave \d+ held-out problems in \d+ draws, expected 100"):
        HeldOut(0, name="chain_sum", args=SMALL, problems=100)


def execution(row: dict[str, Any], outputs: dict[str, Any]) -> Execution:
    """As the reward meets it: over the wire."""
    task = Task(id="s/0/0/0", run="t", source="s", ordinal=0, group="s/0/0", group_size=1, member=0, **row)
    sample = Sample(
        token_ids=np.zeros(1, np.int32), prompt_len=1, loss_mask=np.zeros(0, bool), logprobs=np.zeros(0, np.float32),
        outputs=outputs,
    )  # fmt: skip
    made = Execution(id="e", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=0.0)
    return decode(encode(made), Execution)


# A plain answer, one that its scorer parses, and two whose scorers compare tuples, which do not travel.
@pytest.mark.parametrize("name", ["chain_sum", "countdown", pytest.param("arc_agi", marks=pytest.mark.slow), "rearc"])
def test_the_librarys_own_answer_scores_one_over_the_wire(name: str) -> None:
    row = Problems(0, name=name).row(0, 0)
    assert score(execution(row, {"text": f"so: <answer>{row['label']}</answer>"})) == 1.0
    assert score(execution(row, {"text": "I do not know"})) <= 0.05
    assert score(execution(row, {})) <= 0.05


def test_an_answer_that_makes_its_scorer_raise_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Problems(0, name="chain_sum", args=SMALL).row(0, 0)
    made = execution(row, {"text": "7"})

    def raises(self: object, answer: str | None, entry: dict[str, Any]) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(gym.arithmetic.chain_sum.ChainSumDataset, "score_answer", raises)
    assert score(made, extraction="number") == 0.0


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chain_sums", {}, "no such environment.*did you mean `chain_sum`"),
        ("composite", {}, "mix sources with `source.mixture`"),
        ("chain_sum", {"min_term": 1}, "arguments that it refuses .*min_term"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "arguments that it refuses"),
        ("chain_sum", {"seed": 1}, "`seed` among the arguments"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(HookError, match=message):
        Problems(0, name=name, args=args)


def test_generators_that_follow_the_order_of_sets_need_it_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(HookError, match="export PYTHONHASHSEED=0"):
        Problems(0, name="ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert Problems(0, name="ransom_note").row(0, 0)["prompt"]


def test_an_absent_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(HookError, match=r'the extra `environments`. Remedy: pip install "physarum\[environments\]"'):
        open_dataset("chain_sum", {})


def test_the_recipe_of_the_real_model_resolves_and_a_wrong_name_in_it_is_found() -> None:
    recipe = Path(__file__).resolve().parents[2] / "configs" / "h200_smollm2.yaml"
    config = resolve(recipe)
    assert list(check_hooks(config)) == []
    assert config.source.chat is not None and config.source.chat.template is not None
    assert config.source.chat.template.is_file()
    (problem,) = check_hooks(resolve(recipe, parse_command_line(["source.environment.name=chain_sun"])))
    assert "source.environment" in problem.where
    assert "did you mean `chain_sum`" in problem.remedy
