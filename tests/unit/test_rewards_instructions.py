"""Each instruction by a text that follows it and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.instructions import CHECKS, score_instructions
from physarum.configs.reward_types import IfbenchReward

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "Cats and dogs", "cats only"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a b a", "a b"),
    ("keywords:forbidden_words", {"forbidden_words": ["sun"]}, "Sunday", "the Sun."),
    ("keywords:letter_frequency", {"letter": "z", "let_frequency": 1, "let_relation": "less than"}, "abc", "Zoo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "three whole words"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "One.\n\n'Then, two.",
        "Then one.\n\nTwo.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name] at home"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. more", "Bye, no PS"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<poem>>\nroses", "<poem>\nroses"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi\nhi", "hi"),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "So. any questions?", "Any questions? No."),
    ("startend:quotation", {}, '"quoted"', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "at least"},
        "so GOOD",
        "so good",
    ),
    ("change_case:english_capital", {}, "ALL OF IT", "Not all"),
    ("change_case:english_lowercase", {}, "all of it", "Not all"),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]


def score(text: str, ids: Any, kwargs: Any = None, **options: Any) -> float:
    metadata = {"instruction_id_list": ids, "kwargs": kwargs}
    return score_instructions(Answer(text=text, metadata=metadata, task="t"), IfbenchReward(**options))


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_followed_and_not(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert score(good, [name], [arguments]) == 1.0
    assert score(bad, [name], [{**arguments, "unused": None}]) == 0.0
    assert score("  ", [name], [arguments]) == 0.0


def test_every_instruction_has_its_case() -> None:
    assert [name for name, *_ in CASES] == list(CHECKS)


def test_all_or_their_share() -> None:
    both = ["punctuation:no_comma", "change_case:english_lowercase"]
    assert score("Two words", both) == 0.0
    assert score("Two words", both, partial=True) == 0.5
    assert score("two words", both) == 1.0


def test_loose_overlooks_a_first_line() -> None:
    text = "Sure, here it is:\n*lower case*"
    assert score(text, ["punctuation:no_comma"]) == 0.0
    assert score(text, ["punctuation:no_comma"], loose=True) == 1.0


@pytest.mark.parametrize(
    ("ids", "kwargs", "words"),
    [
        (["keywords:existance"], None, "did you mean keywords:existence"),
        (["language:response_language"], [{"language": "de"}], "not covered"),
        (["keywords:existence"], [{"keyword": "a"}], "does not take"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "about"}], "'less than' or 'at least'"),
        (["punctuation:no_comma"], [{}, {}], "expected a list of as many metadata.kwargs"),
        ([], None, "no metadata.instruction_id_list"),
        (None, None, "no metadata.instruction_id_list"),
    ],
)
def test_what_cannot_be_checked_is_named(ids: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        score("some text", ids, kwargs)


def test_deeply_nested_json_is_no_json() -> None:
    assert score("[" * 50_000, ["detectable_format:json_format"], max_chars=100_000) == 0.0
