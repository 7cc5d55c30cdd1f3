"""Mathematical answers: what counts as equal, where an answer is looked for, and that none takes longer than it may."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.dapo import integer_in, score_dapo
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.extraction import last_boxed
from physarum.agents.rewards.mathematics import score_deepscaler, score_math
from physarum.configs.reward_types import DapoReward, DeepscalerReward, MathReward


def math(text: str, label: Any, **options: Any) -> float:
    return score_math(Answer(text=text, label=label, task="t"), MathReward(**options))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 7$", "7"),
        (r"\boxed{1} and \boxed{2", None),  # an earlier box does not stand in for one that was cut off
        (r"\boxed{}", ""),
        ("no box", None),
        ("\\boxed", None),
        (r"\boxed{" * 50_000, None),
    ],
)
def test_the_last_box(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@pytest.mark.parametrize(
    ("said", "label", "right"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("1000", "1,000", True),
        ("x=72", 72, True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        (r"50\%", "0.5", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("3", r"thus \boxed{3}", True),
        ("3", "$3$", True),
        ("4", [3, 4], True),
        ("5", [3, 4], False),
        ("0.49", "0.5", False),
        ("", "0", False),
        ("12", "1", False),
    ],
)
def test_boxed_answers_are_compared_as_expressions(said: str, label: Any, right: bool) -> None:
    assert math(f"thinking 99 \\boxed{{{said}}} done", label) == float(right)


def test_an_answer_without_a_box_counts_only_where_it_may_stand_anywhere() -> None:
    assert math("The final answer is $12$.", "12") == 0.0
    assert math("The final answer is $12$.", "12", answer="anywhere") == 1.0


def test_an_endless_power_is_wrong_within_its_deadline() -> None:
    started = time.monotonic()
    assert math(r"\boxed{9^{9^{9^{9}}}}", "10", timeout_s=1) == 0.0
    assert time.monotonic() - started < 8.0


def test_a_very_long_answer_is_not_parsed() -> None:
    started = time.process_time()
    assert math(r"\boxed{" + "1+" * 100_000 + "1}", "10") == 0.0
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("label", [None, "", {}, [], True])
def test_a_row_without_a_mathematical_label_is_named(label: Any) -> None:
    with pytest.raises(RewardError, match="task t has"):
        math(r"\boxed{1}", label)


def test_outside_the_main_thread_is_said_not_silently_wrong() -> None:
    raised: list[BaseException] = []

    def score() -> None:
        try:
            math(r"\boxed{1}", "1")
        except RewardError as error:
            raised.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"hm</think>\boxed{4}", 1.0),
        (r"###Response \boxed{4}", 1.0),
        (r"\boxed{4}", 0.0),  # never ended its thinking
        (r"\boxed{4}</think> it is 4", 0.0),
        (r"</think>\boxed{5}", 0.0),
    ],
)
def test_deepscaler_reads_behind_the_thinking(text: str, value: float) -> None:
    assert score_deepscaler(Answer(text=text, label="4"), DeepscalerReward()) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,024", 1024),
        (r"$\boxed{34}$", 34),
        ("x = 72 dollars.", 72),
        (r"90^\circ", 90),
        ("-3", -3),
        (r"\text{12 }", 12),
        ("5.0", 5),
        (r"\boxed{7}.", 7),
        ("3.5", None),
        ("1/2", None),
        ("12 or 13", None),
        ("", None),
        ("1,02", None),
    ],
)
def test_integers_without_their_dress(text: str, number: int | None) -> None:
    assert integer_in(text) == number


def test_dapo_reads_the_last_answer_line_near_the_end() -> None:
    def dapo(text: str, label: Any = "34", **options: Any) -> float:
        return score_dapo(Answer(text=text, label=label, task="t"), DapoReward(**options))

    assert dapo("Answer: 33\nwait\nAnswer: 34") == 1.0
    assert dapo("Answer: 34\nAnswer: 33") == -1.0
    assert dapo("it is 34") == -1.0
    assert dapo("Answer: 34" + " " * 300) == -1.0
    assert dapo("Answer: 34" + " " * 300, tail_chars=400) == 1.0
    assert dapo("Answer: 33", wrong=0.0) == 0.0
    with pytest.raises(RewardError, match="expected an integer"):
        dapo("Answer: 1", label="pi")
