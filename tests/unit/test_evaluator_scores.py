"""pass@k against its definition by enumeration; answers that are missing count 0; sets of an evaluation and their own parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from physarum.actors import eval_sets
from physarum.actors.evaluator.passes import pass_at
from physarum.actors.evaluator.problems import load_problems
from physarum.actors.evaluator.scores import combined, described
from physarum.actors.evaluator.tally import Tally
from physarum.actors.states import SetScore
from physarum.bus.records import ExecutionHeader, SampleHeader, Task
from physarum.bus.version import Span
from physarum.configs.checks.imports import check_hooks
from physarum.configs.errors import ConfigError
from physarum.configs.evaluation import EvaluationSet
from physarum.configs.loader import dump, resolve
from physarum.configs.root import RootConfig

LABEL = "policy@1.3"


@st.composite
def answered(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Answers to each problem, k, and how many of the answers to each are right."""
    samples = draw(st.integers(1, 7))
    return samples, draw(st.integers(1, samples)), draw(st.lists(st.integers(0, samples), min_size=1, max_size=4))


@settings(max_examples=80, deadline=None)
@given(answered())
def test_pass_at_k_is_the_share_of_draws_of_k_answers_that_solve(case: tuple[int, int, list[int]]) -> None:
    samples, k, solved = case
    shares = []
    for correct in solved:
        draws = list(itertools.combinations([answer < correct for answer in range(samples)], k))
        shares.append(sum(map(any, draws)) / len(draws))
    assert pass_at(k, samples, solved) == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def test_pass_at_k_of_many_answers_neither_overflows_nor_rounds_away() -> None:
    assert pass_at(1, 10_000, [1]) == pytest.approx(1e-4)
    assert pass_at(5_000, 10_000, [1]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@3 of 2 answers"):
        pass_at(3, 2, [1])


def tasks(problems: int, samples: int) -> list[Task]:
    return [
        Task(
            id=f"eval/x/{group}/{member}", run="r", source="eval/x", ordinal=samples * group + member, group=f"eval/x/{group}",
            group_size=samples, member=member, task_class="eval",
        )
        for group in range(problems)
        for member in range(samples)
    ]  # fmt: skip


def header(task: Task, *rewards: float | None, version: str = LABEL) -> ExecutionHeader:
    samples = [
        SampleHeader(
            tokens=2, response=1, trainable=1, reward=reward, status="completed",
            spans=[Span(version, 0, 1)], span_trainable=[1],
        )
        for reward in rewards
    ]  # fmt: skip
    return ExecutionHeader(
        execution=f"{task.id}:e", task=task.id, source=task.source, ordinal=task.ordinal, group=task.group,
        group_size=task.group_size, member=task.member, attempt=0, tenant="", digest="", samples=samples,
    )  # fmt: skip


def part(**values: Any) -> EvaluationSet:
    return EvaluationSet(data=("x",), **values)


def test_answers_that_are_missing_dead_or_unscored_count_as_not_solved() -> None:
    asked = tasks(2, 4)
    tally = Tally(part(samples=4, pass_at=(1, 2, 4)), LABEL, asked)
    for task, reward in zip(asked[:3], (1.0, 0.5, None), strict=True):
        tally.result(header(task, reward))
    tally.result(header(asked[0], 1.0))  # a second execution of the same task
    tally.result(header(asked[4], 0.0, 1.0, version="policy@1.4"))  # fan-out: their mean
    tally.buried(asked[5].id)
    tally.buried("somebody/else/0")
    tally.result(header(tasks(9, 1)[8], 1.0))
    assert (tally.missing, tally.dead) == (3, 1)
    found = tally.score()
    assert found.score == (1.0 + 0.5 + 0.5) / 8
    assert (found.problems, found.samples, found.scored, found.off_version) == (2, 4, 3, 1)
    assert found.pass_at == {1: 1 / 8, 2: pytest.approx((1 - 3 / 6) / 2), 4: 0.5}
    lenient = Tally(part(samples=4, pass_at=(4,), solved_at=0.5), LABEL, asked)
    lenient.result(header(asked[4], 0.5))
    assert lenient.score().pass_at == {4: 0.5}


def test_sets_count_the_same_however_many_problems_they_have() -> None:
    small = SetScore(score=1.0, problems=1, samples=2, scored=2, off_version=0, pass_at={2: 1.0})
    large = SetScore(score=0.0, problems=99, samples=1, scored=98, off_version=3)
    both = combined(LABEL, {"small": small, "large": large}, 1.0, 2.0)
    assert (both.score, both.problems, both.scored, both.off_version) == (0.5, 100, 100, 3)
    assert described(small) == "1.0000, pass@2 1.0000 over 1 problems x 2 (2 scored)"
    assert described(large).endswith("99 problems x 1 (98 scored, 3 of another version)")


def config(folder: Path, evaluation: dict[str, Any]) -> RootConfig:
    path = folder / "run.yaml"
    path.write_text(
        "run: {name: r}\nmodel: {path: m}\nsource: {data: a.jsonl, columns: {prompt: q}, chat: {system_prompt: s}}\n"
        "rollout: {generate: 'physarum.agents.single_turn:generate'}\nengines: {policy: {}}\n"
        "reward: {hook: 'physarum.agents.calculator.reward:exact_match'}\n"
        f"evaluation: {json.dumps(evaluation)}\ntrainer: {{objective: rl, lr: 1.0}}\nstop: {{steps: 1}}\n"
    )
    return resolve(path)


def test_sets_have_columns_chat_sampling_and_hooks_of_their_own_or_the_runs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"p": "b", "q": "no"}\n{"p": "c"}\n')
    own = {
        "data": "b.jsonl", "columns": {"prompt": "p"}, "chat": {"system_prompt": "own"}, "samples": 4, "pass_at": [1, 4],
        "sampling": {"top_k": 1}, "generate": {"hook": "physarum.agents.calculator.episode:generate", "args": {"max_turns": 1}},
        "reward": {"hook": "nosuch.module:f"},
    }  # fmt: skip
    made = config(tmp_path, {"sets": {"plain": {"data": "a.jsonl"}, "own": own}, "sampling": {"top_p": 0.5}})
    assert made.evaluation is not None
    sets = eval_sets.sets_of(made)
    plain, other = (load_problems(made, name, sets[name]) for name in ("plain", "own"))
    assert [row["prompt"] for row in plain + other] == ["a", "b", "c"]
    assert plain[0]["metadata"]["chat"]["system_prompt"] == "s"
    assert other[0]["metadata"]["chat"]["system_prompt"] == "own"
    assert made.evaluation.sampling_of(sets["plain"]).top_p == 0.5
    assert made.evaluation.sampling_of(sets["own"]).top_k == 1
    (problem,) = check_hooks(made)
    assert "evaluation.sets.own.reward.hook" in problem.where
    again = tmp_path / "again.yaml"
    again.write_text(dump(made))
    assert resolve(again) == made


def test_a_problem_that_no_message_holds_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ended the evaluator, at its first evaluation."""
    rows = [{"p": "a" * 10_000}, *({} for _ in range(30)), {"p": "b"}]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    made = config(tmp_path, {"sets": {"own": {"data": "b.jsonl", "columns": {"prompt": "p"}}}})
    found = load_problems(made, "own", eval_sets.sets_of(made)["own"], limit_bytes=8000)
    assert [row["prompt"] for row in found] == ["b"]
    assert "expected at most 8000 with headers" in caplog.text
    assert caplog.text.count("skips a problem") == 20 and "skips 31 problems" in caplog.text


def test_a_task_finds_what_its_set_has_of_its_own() -> None:
    def of(source: str, task_class: Any = "eval") -> str:
        task = Task(id="t", run="r", source=source, ordinal=0, group="g", group_size=1, member=0, task_class=task_class)
        return eval_sets.own(task, {"aime": "its own"}, "the run's")

    assert of(eval_sets.source_name(LABEL, "aime")) == "its own"
    assert of(eval_sets.source_name(LABEL, "main")) == "the run's"
    assert of("aime", "p1") == "the run's", "a source may have the name of a set"


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"sets": {}}, "sets"),
        ({"sets": {"a": {"data": "x"}}, "data": "y"}, "found `data` and `sets`"),
        ({"data": "x", "samples": 2, "pass_at": [1, 4]}, "found pass@4; expected `pass_at` within `samples: 2`"),
        ({"sets": {"a": {}}}, "expected exactly one of `hook`, `data`, `environment`"),
    ],
)
def test_what_is_no_evaluation_is_refused(tmp_path: Path, evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, evaluation)
