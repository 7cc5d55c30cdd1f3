"""Problems are pure functions of their position, and the held-out ones are in no training stream."""

from __future__ import annotations

import pytest

from physarum.agents.calculator.demonstrations import Demonstrations
from physarum.agents.calculator.problems import HeldOut, Problems, held_out
from physarum.agents.errors import ProblemSpaceError


def operands(row: dict) -> tuple[int, int]:
    return row["metadata"]["a"], row["metadata"]["b"]


def test_a_row_is_the_question_with_its_label() -> None:
    row = Problems(0).row(0, 5)
    a, b = operands(row)
    assert row == {"prompt": f"{a:03d}+{b:03d}=", "label": f"{a + b:04d}", "metadata": {"a": a, "b": b}}


def test_rows_depend_on_their_position_alone() -> None:
    forward = [Problems(7).row(1, index) for index in range(50)]
    backward = [Problems(7).row(1, index) for index in reversed(range(50))]
    assert forward == backward[::-1]
    assert Problems(7).row(0, 3) != Problems(7).row(1, 3)
    assert Problems(7).row(0, 3) != Problems(8).row(0, 3)


def test_held_out_problems_are_distinct_fixed_and_in_no_training_stream() -> None:
    source = HeldOut(3, problems=256)
    pairs = {operands(source.row(0, index)) for index in range(len(source))}
    assert len(pairs) == len(source) == 256
    again = HeldOut(3)
    assert [source.row(9, index) for index in range(256)] == [again.row(0, index) for index in range(256)]
    assert all(held_out(pair) for pair in pairs)
    for seed in (0, 3):
        assert not any(held_out(operands(Problems(seed).row(0, index))) for index in range(2000))


def test_a_small_range_is_trained_without_its_held_out_pairs() -> None:
    every = {(a, b) for a in range(6) for b in range(6)}
    trained = {operands(Problems(0, high=6).row(0, index)) for index in range(2000)}
    assert trained == {pair for pair in every if not held_out(pair)}
    assert trained != every


def test_a_range_that_cannot_hold_the_problems_is_refused_with_both_numbers() -> None:
    available = sum(held_out((a, b)) for a in range(6) for b in range(6))
    with pytest.raises(ProblemSpaceError, match=f"found {available} held-out problems .* expected 256"):
        HeldOut(0, problems=256, high=6)


@pytest.mark.parametrize(("low", "high"), [(5, 5), (-1, 10), (0, 1001)])
def test_an_impossible_range_is_refused(low: int, high: int) -> None:
    with pytest.raises(ProblemSpaceError, match="expected 0 <= low < high <= 1000"):
        Problems(0, low=low, high=high)


def test_demonstrations_of_stage_one_all_call_the_tool() -> None:
    rows = Demonstrations(0, tool_share=1.0, rows=8).row(0, 0)["metadata"]["rows"]
    assert [len(row) for row in rows] == [4] * 8
    question, call, result, answer = rows[0]
    digits = question["text"][len("<|im_start|>user\n") :][:7]
    total = f"{int(digits[:3]) + int(digits[4:]):04d}"
    assert question == {"text": f"<|im_start|>user\n{digits}=<|im_end|>\n<|im_start|>assistant\n", "train": False}
    assert call == {"text": f"<tool_call>{digits}</tool_call><|im_end|>", "train": True}
    assert result == {"text": f"\n<|im_start|>tool\n{total}<|im_end|>\n<|im_start|>assistant\n", "train": False}
    assert answer == {"text": f"{total}<|im_end|>", "train": True}


def test_demonstrations_of_stage_two_mix_habits_as_asked() -> None:
    source = Demonstrations(0, tool_share=0.3, rows=100)
    rows = [row for index in range(20) for row in source.row(0, index)["metadata"]["rows"]]
    guesses = [row[1]["text"] for row in rows if len(row) == 2]
    assert 0.67 < len(guesses) / len(rows) < 0.73  # 2,000 draws: 0.70 +- 3 standard deviations
    assert all(text[0] == "~" and 0 <= int(text[1:5]) < 2000 and text[5:] == "<|im_end|>" for text in guesses)
    assert source.row(0, 4) == Demonstrations(0, tool_share=0.3, rows=100).row(0, 4)


def test_no_held_out_problem_is_demonstrated() -> None:
    source = Demonstrations(0, tool_share=0.5, rows=64)
    for index in range(20):
        for row in source.row(0, index)["metadata"]["rows"]:
            digits = row[0]["text"].split("\n")[1]
            assert not held_out((int(digits[:3]), int(digits[4:7])))


@pytest.mark.parametrize(("share", "rows"), [(1.1, 1), (-0.1, 1), (0.5, 0)])
def test_impossible_demonstrations_are_refused(share: float, rows: int) -> None:
    with pytest.raises(ProblemSpaceError, match="expected a share in"):
        Demonstrations(0, tool_share=share, rows=rows)
