"""Every `rm_type` of slime, alone and behind `boxed_`: accepted for a run and for a row, and worth what its convention says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reward_recipe import load
from test_rewards_scoring import execution

from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.extraction import last_boxed
from physarum.agents.rewards.scoring import _function, _options, row_type
from physarum.agents.rewards.scoring import score as score_hook
from physarum.configs.errors import ConfigError
from physarum.configs.reward_types import BOXED, canonical

CHOICES = {"choices": ["red", "green"]}
PAIRS: list[tuple[str, str, Any, dict[str, Any], float]] = [
    ("deepscaler", r"<think>3</think> so \boxed{4}", "4", {}, 1.0),
    ("deepscaler", r"\boxed{4}", "4", {}, 0.0),  # without the end of thinking
    ("dapo", "so\nAnswer: $72$", "72", {}, 1.0),
    ("dapo", "so\nAnswer: 71", "72", {}, -1.0),
    ("math", r"\boxed{\frac{1}{2}}", "0.5", {}, 1.0),
    ("f1", "the red cat", "red cat", {}, 1.0),
    ("gpqa", "The answer is B", "B", CHOICES, 1.0),
    ("gpqa", "The answer is B", 1, CHOICES, 1.0),
    ("gpqa", "The answer is (A).", "green", CHOICES, 0.0),
    ("gpqa", "<think>A?</think> it is green", None, {**CHOICES, "correct_answer": "Green"}, 1.0),
    ("ifbench", "no commas", None, {"instruction_id_list": ["punctuation:no_comma"]}, 1.0),
    ("boxed_dapo", r"\boxed{Answer: 72} and Answer: 3", "72", {}, 1.0),
    ("boxed_math", r"\boxed{7}", "7", {}, 1.0),
    ("boxed_f1", r"red, no: \boxed{blue}", "blue", {}, 1.0),
    ("boxed_f1", "blue", "blue", {}, 0.0),  # what is not boxed is no answer
    ("boxed_gpqa", r"A, or \boxed{B}", "B", CHOICES, 1.0),
    ("boxed_gpqa", r"the answer is B, or \boxed{A}", "B", CHOICES, 0.0),
    ("boxed_ifbench", r"a, b \boxed{c}", None, {"instruction_id_list": ["punctuation:no_comma"]}, 1.0),
]


def scored(name: str, text: str, label: Any, metadata: dict[str, Any]) -> float:
    answer = Answer(text=text, label=label, metadata={**metadata, "rm_type": name}, task="t")
    chosen = row_type(answer, "exact", {})
    if chosen.startswith(BOXED):
        answer = answer.with_text(last_boxed(text) or "")
    return float(_function(chosen.removeprefix(BOXED))(answer, _options(chosen, {})))


@pytest.mark.parametrize(("name", "text", "label", "metadata", "worth"), PAIRS)
def test_a_name_is_worth_what_slime_says(
    name: str, text: str, label: Any, metadata: dict[str, Any], worth: float
) -> None:
    assert scored(name, text, label, metadata) == worth


@pytest.mark.parametrize("name", ["deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "remote_rm"])
def test_every_name_is_accepted_for_a_run_and_behind_boxed_where_that_means_something(
    tmp_path: Path, name: str
) -> None:
    args = "\nargs: {url: 'http://h'}" if name == "remote_rm" else ""
    assert load(tmp_path, f"type: {name}{args}").reward.type == canonical(name) is not None
    if name != "deepscaler":
        assert load(tmp_path, f"type: boxed_{name}{args}").reward.type == canonical(f"boxed_{name}")


def test_boxed_deepscaler_is_refused_since_a_box_holds_no_end_of_thinking(tmp_path: Path) -> None:
    """In slime each of its answers is worth 0."""
    with pytest.raises(ConfigError, match="write `deepscaler`"):
        load(tmp_path, "type: boxed_deepscaler")


def test_boxed_remote_rm_sends_the_whole_answer_as_slime_does() -> None:
    assert canonical("boxed_remote_rm") == "remote_rm"


@pytest.mark.parametrize("name", ["opencua_click", "mathh", "boxed_"])
def test_what_is_no_name_is_refused_and_never_worth_0(name: str) -> None:
    with pytest.raises(RewardError, match="which is no reward"):
        scored(name, "x", "x", {})


@pytest.mark.parametrize("blank", [None, "", "  "])
async def test_a_blank_name_means_the_runs_type(tmp_path: Path, blank: Any) -> None:
    save_tokenizer(tmp_path)
    one = execution(tmp_path, "12", label="12")
    one.task.metadata["rm_type"] = blank
    assert await score_hook(one, name="exact", args={}, row_types={}, folder=str(tmp_path)) == 1.0
