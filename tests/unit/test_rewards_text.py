"""Rewards over texts: exact, F1, one of several options, patterns, tags. Each also by what must not earn anything."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.choice import declared, score_choice
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.patterns import score_format, score_regex
from physarum.agents.rewards.wording import score_exact, score_f1
from physarum.configs.reward_types import ChoiceReward, ExactReward, F1Reward, FormatReward, Normalisation, RegexReward


def answer(text: str, label: Any = None, **metadata: Any) -> Answer:
    return Answer(text=text, label=label, metadata=metadata, task="t")


@pytest.mark.parametrize(
    ("said", "label", "steps", "value"),
    [
        (" Paris \n", "Paris", ("whitespace",), 1.0),
        ("paris", "Paris", ("whitespace",), 0.0),
        ("paris", "Paris", ("case",), 1.0),
        ("The Eiffel-Tower!", "eiffel tower", ("case", "punctuation", "articles", "whitespace"), 0.0),
        ("The Eiffel Tower!", "eiffel tower", ("case", "punctuation", "articles", "whitespace"), 1.0),
        ("ｆｕｌｌ", "full", ("unicode",), 1.0),
        ("12", 12, (), 1.0),
        ("b", ["a", "b"], (), 1.0),
        ("", "", (), 1.0),
    ],
)
def test_exact(said: str, label: Any, steps: tuple[Normalisation, ...], value: float) -> None:
    assert score_exact(answer(said, label), ExactReward(normalise=steps)) == value


@pytest.mark.parametrize(
    ("said", "label", "value"),
    [
        ("the cat sat", "A cat sat.", 1.0),
        ("cat", "cat dog", 2 / 3),
        ("cat cat cat", "cat dog", 0.4),  # one common word of 3 and of 2
        ("", "cat", 0.0),
        ("the", "a", 1.0),  # both empty once normalised
        ("yes it is", "yes", 0.0),
        ("dog", ["cat", "big dog"], 2 / 3),
    ],
)
def test_f1_by_hand(said: str, label: Any, value: float) -> None:
    assert score_f1(answer(said, label), F1Reward()) == pytest.approx(value)


WORDS = st.text(alphabet="ab the.,\n", max_size=40)


@given(WORDS, WORDS)
def test_f1_lies_between_0_and_1_and_is_symmetric(one: str, other: str) -> None:
    value = score_f1(answer(one, other), F1Reward(yes_no=False))
    assert 0.0 <= value <= 1.0
    assert value == score_f1(answer(other, one), F1Reward(yes_no=False))
    assert score_f1(answer(one, one), F1Reward()) == 1.0


@pytest.mark.parametrize("label", [None, True, {"a": 1}, [], [None]])
def test_a_row_without_a_label_is_named(label: Any) -> None:
    with pytest.raises(RewardError, match=r"task t has the label .*source\.columns\.label"):
        score_exact(answer("x", label), ExactReward())


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is C.", "C"),
        ("Answer: (B)", "B"),
        ("**Answer:** D", "D"),
        ("Answer: **D**", "D"),
        (r"so \boxed{A}", "A"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{C. dark blue}", "C"),
        ("Answer: C) dark blue", "C"),
        ("Option B is wrong. The answer is A", "A"),
        ("(C) is correct", "C"),
        ("The answer is B.\nOption A is incorrect.", "B"),
        ("The answer is B, I think.", "B"),
        ("**Final answer**: (B)", "B"),
        (r"\boxed{\mathbf{B}}", "B"),
        (r"\boxed{b}", "B"),
        (r"The correct answer is \(B\)", "B"),
        (r"The answer is: \[ B \]", "B"),
        ("The answer is 'B'.", "B"),
        ("Answer: I'd say none", None),
        ("I think\nC", "C"),
        ("I am not sure", None),
        ("A cat sat on the mat.", None),
        ("Answer: A or B", None),
        ("The answer is A, B, C or D", None),
        (r"\boxed{A, B}", None),
        ("the answer is a good one", None),
        ("Answer: Apples", None),
        ("Answer: b", "B"),
        ("**Answer:** (b).\nI am sure.", "B"),
        ("Answer: b or c", None),
        ("Answer: a triangle", None),
        ("The answer is B. Choice C would only hold without friction.", "B"),
        ("The answer is B. Hm, no: option C.", "C"),
        ("I choose option C because of B.", "C"),
        ("Option A has two, option B has three", "B"),
        ("I can rule out option A. So the correct option is B because water expands.", "B"),
        ("Option A: 5\nOption B: 7\nOption D: 11\nOption B is correct.", "B"),
        ("At first the answer is A. On reflection, option B is correct.", "B"),
        ("The correct answer is C. Choice A (mitosis) is a distractor.", "C"),
        ("The answer is B.\nOption A: too small.\nOption C: wrong sign.", "B"),
        ("The answer is C, unlike option A.", "C"),
        ("The answer is C; I rule out the option A.", "C"),
        ("", None),
    ],
)
def test_a_letter_counts_where_it_is_declared(text: str, letter: str | None) -> None:
    assert declared(text) == letter


CHOICES = ["red", "dark blue", "green"]


@pytest.mark.parametrize(
    ("text", "label", "metadata", "value"),
    [
        ("Answer: B", "B", {}, 1.0),
        ("Answer: B", 1, {"choices": CHOICES}, 1.0),
        ("Answer: B", "Dark blue", {"choices": CHOICES}, 1.0),
        ("It must be dark blue", "B", {"choices": CHOICES}, 1.0),
        ("red, dark blue or green", "B", {"choices": CHOICES}, 0.0),  # naming all earns nothing
        ("not red; I say\ndark blue", "B", {"choices": CHOICES}, 1.0),
        ("<think>Answer: B</think>Answer: C", "B", {"choices": CHOICES}, 0.0),
        ("Answer: X", "x", {"choices": {"X": "1", "Y": "2"}}, 1.0),
        ("Answer: B", "dark blue", {"choices": CHOICES, "correct_letter": "A"}, 0.0),
        ("Answer: Z", "A", {}, 0.0),
        ("Answer: n", "n", {"choices": ["m", "n", "p", "q"]}, 1.0),
        ("Answer: b", "B", {"choices": CHOICES}, 1.0),
    ],
)
def test_choices(text: str, label: Any, metadata: dict[str, Any], value: float) -> None:
    assert score_choice(answer(text, label, **metadata), ChoiceReward()) == value


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("Q", {}),
        (7, {"choices": CHOICES}),
        ("purple", {"choices": CHOICES}),
        (None, {}),
        ("A", {"choices": CHOICES, "valid_letters": ["A"]}),
    ],
)
def test_a_row_whose_right_option_cannot_be_told_is_named(label: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match="task t has"):
        score_choice(answer("Answer: A", label, **metadata), ChoiceReward())


def test_a_long_text_of_near_misses_is_scanned_in_time() -> None:
    started = time.process_time()
    for text in ("answer " * 20_000, "(" * 100_000, "answer is " + " " * 100_000, "A " * 50_000, "\\boxed{A" * 10_000):
        declared(text)
    assert time.process_time() - started < 5.0


def test_a_pattern_is_found_or_fits() -> None:
    assert score_regex(answer("total: 12"), RegexReward(pattern=r"\d+$")) == 1.0
    assert score_regex(answer("total: 12"), RegexReward(pattern=r"\d+", mode="fullmatch")) == 0.0


def test_a_catastrophic_pattern_counts_as_not_found_in_time(caplog: pytest.LogCaptureFixture) -> None:
    started = time.monotonic()
    value = score_regex(answer("a" * 40 + "!"), RegexReward(pattern=r"^(a|aa)+$", timeout_s=0.2))
    assert value == 0.0
    assert time.monotonic() - started < 5.0
    assert "took more than 0.2 s" in caplog.text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think></think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> so", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("</think><think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text: str, value: float) -> None:
    assert score_format(answer(text), FormatReward()) == value


def test_the_prompt_may_have_opened_the_first_tag() -> None:
    assert score_format(answer("a</think><answer>b</answer>"), FormatReward(opened=True)) == 1.0
    assert score_format(answer("<think>a</think><answer>b</answer>"), FormatReward(opened=True)) == 0.0
