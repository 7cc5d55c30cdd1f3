"""Each instruction by a text that follows it and one that does not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.instructions import CHECKS, score_instructions
from physarum.agents.rewards.sentences import count_sentences
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
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "One. Two!",
        "One, e.g. two.",
    ),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]
LANGUAGES = [
    ("en", "The answer is four, and I am sure of it."),
    ("es", "La respuesta es cuatro y estoy seguro."),
    ("de", "Die Antwort ist vier, und ich bin sicher."),
    ("zh", "\u7b54\u6848\u662f\u56db\u3002"),
    ("kn", "\u0c89\u0ca4\u0ccd\u0ca4\u0cb0 \u0ca8\u0cbe\u0cb2\u0ccd\u0c95\u0cc1"),
    ("mr", "\u0909\u0924\u094d\u0924\u0930 \u091a\u093e\u0930 \u0906\u0939\u0947"),
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
    named = [name for name, *_ in CASES]
    assert named == [name for name in CHECKS if name != "language:response_language"] and len(CHECKS) == 25


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
        (["count:word_count_range"], [{"min_words": 3, "max_words": 9}], "not covered"),
        (["keywords:existence"], [{"keyword": "a"}], "does not take"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "about"}], "'less than' or 'at least'"),
        (["punctuation:no_comma"], [{}, {}], "expected a list of as many metadata.kwargs"),
        (["punctuation:no_comma"], ["x"], "as many metadata.kwargs, each a mapping or null"),
        ([], None, "no metadata.instruction_id_list"),
        (None, None, "no metadata.instruction_id_list"),
    ],
)
def test_what_cannot_be_checked_is_named(ids: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        score("some text", ids, kwargs)


def test_deeply_nested_json_is_no_json() -> None:
    assert score("[" * 50_000, ["detectable_format:json_format"], max_chars=100_000) == 0.0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("...", 0),
        ("One", 1),
        ("One. Two. Three.", 3),
        ("Is it? Yes! Really?! \u201cSure.\u201d He left.", 5),
        ("Dr. Smith paid $3.50 to J. Doe at 5 p.m. in the U.S. and left.", 1),
        ("1. First item\n2. Second item. With more.", 3),
        ("A title\n\nOne sentence here. Another (in brackets.) Done.", 4),
        ("See example.com for v2.0 now. \u00c9t\u00e9 came.", 2),
        ("Wait... what? I did.", 2),
        ("It was I. You know.", 2),
        ("\u7b54\u6848\u662f\u56db\u3002\u771f\u7684\uff1f\u662f\u3002", 3),
    ],
)
def test_sentences_are_counted(text: str, sentences: int) -> None:
    assert count_sentences(text) == sentences


@pytest.mark.parametrize(("language", "text"), LANGUAGES)
def test_a_text_is_of_its_language_and_no_other(language: str, text: str) -> None:
    pytest.importorskip("py3langid")
    for other, _ in LANGUAGES:
        assert score(text, ["language:response_language"], [{"language": other}]) == float(other == language)


def test_a_text_that_says_nothing_of_its_language_does_not_follow_and_an_unknown_code_is_refused() -> None:
    pytest.importorskip("py3langid")
    assert score("ok", ["language:response_language"], [{"language": "af"}]) == 0.0
    assert score("1 + 1 = 2", ["language:response_language"], [{"language": "de"}]) == 1.0
    with pytest.raises(RewardError, match="found language 'klingon'; expected one of"):
        score("nuqneH", ["language:response_language"], [{"language": "klingon"}])


def test_a_host_without_the_detector_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(RewardError, match=r"needs py3langid.*physarum\[languages\]"):
        score("Ja.", ["language:response_language"], [{"language": "de"}])


def test_one_mapping_of_arguments_is_that_of_the_one_instruction() -> None:
    assert score("one two", ["length_constraints:number_words"], {"num_words": 2, "relation": "at least"}) == 1.0
