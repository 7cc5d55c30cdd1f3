"""One letter of several options.

A letter counts where it is declared: boxed (there a small one, too), behind `answer`, `option` or `choice` and not called
wrong, as `(C) is correct`, behind `answer:` at a line's end (a small one, too), or alone on the last line. A stray capital
(`I think`) does not. The last declaration counts, and one that names two letters counts for none, so listing all options earns
nothing. An option that is only mentioned (`Choice C would hold if`, `unlike option A`) takes the place of no declaration.
"""

from __future__ import annotations

import re
import string
from typing import Any, Final

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.extraction import after_thinking, last_boxed
from physarum.configs.reward_types import ChoiceReward

_DRESS: Final = r"(?:\\[(\[]|[\s*_($\[{\"'`]){0,8}"
_STYLE: Final = r"\\(?:text|textbf|mathrm|mathbf)\b"
_LETTER: Final = rf"{_DRESS}(?:{_STYLE}\{{)?{_DRESS}(?-i:([A-Z]))(?![A-Za-z0-9]|['\u2019][A-Za-z])"
_REFUTED: Final = r"[\s*_)\]}.]{0,8}\bis\s{1,4}(?:incorrect|wrong|false|not)\b"
_SMALL: Final = r"\banswer[*_]{0,3}\s{0,4}[:=][\s*_($\[]{0,8}(?-i:([a-z]))[\s*_)$\].]{0,8}$"
_DECLARED: Final = re.compile(
    rf"{_SMALL}|\b(answer|option|choice)\b[*_]{{0,3}}(?:\s{{1,4}}is\b)?\s{{0,4}}[:=]?{_LETTER}(?!{_REFUTED})"
    rf"|(?<![A-Za-z0-9]){_LETTER}[\s*_)\]}}]{{0,8}}is\s{{1,4}}(?:the\s{{1,4}})?correct",
    re.IGNORECASE | re.MULTILINE,
)
_CHOSEN: Final = re.compile(r"(?:option|choice)\b[*_]{0,3}(?:\s{1,4}is\b|\s{0,4}[:=])", re.IGNORECASE)
_CONFIRMED: Final = re.compile(r"[\s*_)\]}.]{0,8}\bis\s{1,4}(?:the\s{1,4})?(?:correct|right|best)\b", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"[\s*_)\]}$'\"]{0,8}(?:[.!;]|\Z|$)", re.MULTILINE)
_SET_APART: Final = re.compile(
    r"\b(?:unlike|not|than|except|over|versus|vs|out|eliminate|against|from)\W{1,4}(?:\w+\W)?$", re.IGNORECASE
)
"""What stands before an option that is not the one."""
_ANOTHER: Final = re.compile(
    r"[\s*_)\]}.]{0,8}(?:,|/|&|\bor\b|\band\b)[\s*_(\[{]{0,8}(?:or\s|and\s)?[\s(]{0,4}(?!I\s+[a-z])[A-Z](?![A-Za-z0-9])"
)
_ALONE: Final = re.compile(r"[\s*_(\[{$]*([A-Z])[\s*_)\]}$.:]*")
_LISTED: Final = re.compile(r"[\s*_(\[{$]*([A-Z])[.):]\s.*", re.DOTALL)
_TEXTS: Final = ("correct_answer", "answer_text")
_WORDS: Final = re.compile(r"[^\w]+")


def score_choice(answer: Answer, options: ChoiceReward) -> float:
    """1.0 for the right option, else 0.0. Raises RewardError for a row from which the right one cannot be told."""
    choices = _choices(answer.metadata)
    letters = _letters(answer, choices, options)
    right = _right(answer, choices, letters)
    text = after_thinking(answer.text)
    said = declared(text, "" if any(len(_plain(one)) == 1 for one in choices) else "".join(letters))
    if said is None and options.by_text and choices:
        said = _by_text(text, choices, letters)
    return float(said is not None and said == right)


def declared(text: str, small: str = string.ascii_uppercase) -> str | None:
    """The letter that the text declares; None where it declares none, or two at once. `small`: those that may be small ones."""
    boxed = last_boxed(text)
    if boxed is not None:
        bare = re.sub(_STYLE, "", boxed)
        found = _ALONE.fullmatch(bare.upper()) or _LISTED.fullmatch(bare)
        return found[1] if found else None
    last = _last_declaration(text, small)
    if last is not None:
        small, _, letter, correct = last.groups()
        return None if _ANOTHER.match(text, last.end()) else (small or letter or correct).upper()
    lines = text.strip().splitlines()
    alone = _ALONE.fullmatch(lines[-1][:64]) if lines else None
    return alone[1] if alone else None


def _last_declaration(text: str, small: str) -> re.Match[str] | None:
    last, last_is_firm = None, False
    for found in _DECLARED.finditer(text):
        if found[1] and found[1].upper() not in small:
            continue
        firm = _is_firm(text, found)
        if firm or not last_is_firm:
            last, last_is_firm = found, firm
    return last


def _is_firm(text: str, found: re.Match[str]) -> bool:
    """Whether an option is declared, and not only mentioned."""
    if (found[2] or "answer").lower() == "answer" or _CHOSEN.match(found[0]):
        return True
    if _CONFIRMED.match(text, found.end()):
        return True
    apart = _SET_APART.search(text[max(0, found.start() - 24) : found.start()])
    return apart is None and _SENTENCE_END.match(text, found.end()) is not None


def _choices(metadata: dict[str, Any]) -> list[str]:
    given = metadata.get("choices")
    values = given.values() if isinstance(given, dict) else given if isinstance(given, list) else []
    return [str(one) for one in values]


def _letters(answer: Answer, choices: list[str], options: ChoiceReward) -> list[str]:
    given = answer.metadata.get("valid_letters")
    if isinstance(given, (list, str)) and given:
        letters = [str(one).upper() for one in given]
    elif isinstance(named := answer.metadata.get("choices"), dict) and all(len(str(key)) == 1 for key in named):
        letters = [str(key).upper() for key in named]
    else:
        letters = list(string.ascii_uppercase[: len(choices)] if choices else options.letters)
    if choices and len(letters) != len(choices):
        raise RewardError(
            f"task {answer.task} has {len(choices)} choices and the letters {letters}; expected one for each"
        )
    return letters


def _right(answer: Answer, choices: list[str], letters: list[str]) -> str:
    """`correct_letter`, a label that is a letter, an index from 0, or the text of one choice; without either, that text as
    slime's rows have it (`correct_answer`, `answer_text`)."""
    named = (answer.metadata.get("correct_letter"), answer.label, *(answer.metadata.get(name) for name in _TEXTS))
    given = next((one for one in named if one is not None), None)
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(letters):
        return letters[given]
    if isinstance(given, str):
        if given.strip().upper() in letters:
            return given.strip().upper()
        same = [letter for letter, choice in zip(letters, choices, strict=False) if _plain(choice) == _plain(given)]
        if len(same) == 1:
            return same[0]
    raise RewardError(
        f"task {answer.task} has the label {given!r:.80}; expected one of the letters {''.join(letters)}, an index from 0, or"
        " the text of exactly one of metadata.choices"
    )


def _by_text(text: str, choices: list[str], letters: list[str]) -> str | None:
    """The option whose text is boxed, or alone on the last line, or the only one that the text holds."""
    lines = text.strip().splitlines()
    for place in (last_boxed(text), lines[-1] if lines else None):
        if place is not None:
            same = [letter for letter, one in zip(letters, choices, strict=True) if _plain(one) == _plain(place)]
            if len(same) == 1:
                return same[0]
    spoken = f" {_plain(text)} "
    held = [
        letter for letter, one in zip(letters, choices, strict=True) if _plain(one) and f" {_plain(one)} " in spoken
    ]
    return held[0] if len(held) == 1 else None


def _plain(text: str) -> str:
    return _WORDS.sub(" ", text.casefold()).strip()
