"""Instructions that a program can verify: `metadata.instruction_id_list` and `metadata.kwargs`, as in IFEval.

Ids and meaning are those of IFEval (Zhou et al. 2023, arXiv 2311.07911, table 1), written anew; all 25. Languages are told by
py3langid (an extra, imported at the first row that asks; its model comes with it), sentences are counted by sentences.py. Not
covered, and refused by name: the further constraints of IFBench (Pyatkin et al. 2025, arXiv 2507.02833). Capitals and lower
case are judged as letters, without asking whether the text is English. A row that asks for what is not covered raises:
scoring only the rest would teach to ignore it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.sentences import count_sentences
from physarum.configs.reward_types import IfbenchReward
from physarum.configs.suggest import nearest

Check = Callable[..., bool]


def score_instructions(answer: Answer, options: IfbenchReward) -> float:
    """1.0 where all are followed (`partial`: their share), else 0.0. Raises RewardError for what cannot be checked."""
    asked = instructions_of(answer)
    texts = [answer.text] if not options.loose else loosened(answer.text)
    if len(answer.text) > options.max_chars or not answer.text.strip():
        return 0.0
    followed = [any(text.strip() and _follows(text, *one, answer) for text in texts) for one in asked]
    return sum(followed) / len(followed) if options.partial else float(all(followed))


def instructions_of(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """Id and arguments of each; arguments that are null are left out."""
    ids, given = answer.metadata.get("instruction_id_list"), answer.metadata.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise RewardError(f"task {answer.task} has no metadata.instruction_id_list; expected a list of at least one id")
    arguments = (
        [{}] * len(ids) if given is None else [given] * len(ids) if isinstance(given, dict) and len(ids) == 1 else given
    )
    if (
        not isinstance(arguments, list)
        or len(arguments) != len(ids)
        or not all(one is None or isinstance(one, dict) for one in arguments)
    ):
        raise RewardError(
            f"task {answer.task} has {len(ids)} instructions; expected a list of as many metadata.kwargs, each a mapping or"
            " null"
        )
    return [
        (str(one), {name: value for name, value in (given or {}).items() if value is not None})
        for one, given in zip(ids, arguments, strict=True)
    ]


def loosened(text: str) -> list[str]:
    """IFEval's loose accuracy: without the first line, the last line, both; each also without asterisks."""
    lines = text.split("\n")
    cuts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [*cuts, *(cut.replace("*", "") for cut in cuts)]


def _follows(text: str, name: str, arguments: dict[str, Any], answer: Answer) -> bool:
    check = CHECKS.get(name)
    if check is None:
        near = nearest(name, CHECKS)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(CHECKS)}"
        raise RewardError(f"task {answer.task} asks for the instruction {name!r}, which is not covered; {hint}")
    try:
        return check(text, **arguments)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"task {answer.task}: instruction {name} does not take {arguments!r:.200}: {error}"
        ) from error


def _compared(count: int, relation: str, bound: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"found relation {relation!r}; expected 'less than' or 'at least'")
    return count < bound if relation == "less than" else count >= bound


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _count(word: str, text: str) -> int:
    return len(re.findall(re.escape(word), text, re.IGNORECASE))


def _whole_words(word: str, text: str) -> int:
    return len(re.findall(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def _existence(text: str, *, keywords: Sequence[str]) -> bool:
    return all(_count(word, text) for word in keywords)


def _frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compared(_count(keyword, text), relation, frequency)


def _forbidden(text: str, *, forbidden_words: Sequence[str]) -> bool:
    return not any(_whole_words(word, text) for word in forbidden_words)


def _letters(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def _number_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compared(len(_words(text)), relation, num_words)


def _paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are divided by a line `***`; an empty one may stand only at either end."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = [part for index, part in enumerate(parts) if part.strip() or 0 < index < len(parts) - 1]
    return all(part.strip() for part in inner) and len(inner) == num_paragraphs


def _nth_paragraph(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are divided by an empty line."""
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    begins = re.match(r"['\"]*([^\s.,?!'\"]*)", parts[nth_paragraph - 1])
    return begins is not None and begins[1].lower() == first_word.lower()


def _placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= num_placeholders


def _postscript(text: str, *, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in postscript_marker if not letter.isspace()]
    return re.search(r"^[ \t]*" + r"\s?".join(letters), text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, *, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*[^*\n]|-)", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def _highlights(text: str, *, num_highlights: int) -> bool:
    found = re.findall(r"\*\*([^\n*]*)\*\*|\*([^\n*]*)\*", text)
    return sum(1 for double, single in found if (double or single).strip()) >= num_highlights


def _sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) >= num_sections


def _json(text: str) -> bool:
    bare = text.strip().removeprefix("```json").removeprefix("```Json").removeprefix("```JSON").removeprefix("```")
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n<>]+>>", text))


def _two_responses(text: str) -> bool:
    """Divided by six asterisks, and different."""
    parts = text.split("******")
    inner = [part.strip() for index, part in enumerate(parts) if part.strip() or 0 < index < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _repeat(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    inner = text.strip()
    return len(inner) > 1 and inner[0] == inner[-1] == '"'


def _capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    capitals = [word for word in re.findall(r"[\w'-]+", text) if word.isupper()]
    return _compared(len(capitals), capital_relation, capital_frequency)


def _sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compared(count_sentences(text), relation, num_sentences)


def _language(text: str, *, language: str) -> bool:
    """`language` by its code of ISO 639-1; a text of no letters is of every language, as in IFEval."""
    try:
        import py3langid
    except ImportError as error:
        raise RewardError(
            "an instruction language:response_language needs py3langid, which is not installed here; expected it on every host"
            ' that scores. Remedy: pip install "physarum[languages]"'
        ) from error
    if not any(map(str.isalpha, text)):
        return True
    code, ranked = language.lower().partition("-")[0], py3langid.rank(text)
    if code not in dict(ranked):
        raise ValueError(f"found language {language!r}; expected one of {', '.join(sorted(dict(ranked)))}")
    (first, likelihood), (_, second) = ranked[:2]
    return bool(first == code and likelihood > second)  # equal: the text says nothing of its language


CHECKS: Final[dict[str, Check]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "length_constraints:number_sentences": _sentences,
    "language:response_language": _language,
    "punctuation:no_comma": lambda text: "," not in text,
}
