"""How many sentences a text has, by rules for English, so that nothing is downloaded where rewards run.

A sentence ends at a full stop, `!`, `?`, an ellipsis or their full-width forms, with what closes a quotation or bracket behind
them, where a blank and then a capital, a digit or an opening mark follow, or where the paragraph ends. A full stop ends none
behind an abbreviation, a single initial, or the number of a list's item. IFEval counts with NLTK's punkt, which is learnt: the
two differ at rare abbreviations, and where a sentence begins with a small letter.
"""

from __future__ import annotations

import re
from typing import Final

_CLOSING: Final = r"[\"'\u201d\u2019)\]*_]*"
_OPENING: Final = r"[\"'\u201c\u2018(\[*_]*"
_END: Final = re.compile(rf"([.!?\u2026]+){_CLOSING}(?=\s+{_OPENING}[A-Z0-9\u00c0-\u00de]|\s*\Z)")
_WIDE: Final = re.compile(r"(?<=[\u3002\uff01\uff1f])(?![\u3002\uff01\uff1f\u201d\u2019)\]])")
_ABBREVIATIONS: Final = frozenset(
    """mr mrs ms dr prof sr jr st vs etc fig no vol ed eds inc ltd co corp gen rep sen gov capt col lt sgt rev hon approx dept
    est jan feb mar apr jun jul aug sept oct nov dec e.g i.e cf al a.m p.m u.s u.k ph.d""".split()  # noqa: SIM905
)
_MARK: Final = re.compile(r"\s*(?:\d{1,3}|[A-Za-z])")


def count_sentences(text: str) -> int:
    """Each paragraph (a line with a letter or digit) has at least one."""
    return sum(_in_paragraph(part) for line in text.splitlines() for part in _WIDE.split(line))


def _in_paragraph(line: str) -> int:
    line, start, count = line.strip(), 0, 0
    for end in _END.finditer(line):
        if end[1] == "." and end.end() < len(line) and _goes_on(line[start : end.start()]):
            continue
        count += _says_something(line[start : end.end()])
        start = end.end()
    return count + _says_something(line[start:])


def _says_something(text: str) -> bool:
    return any(map(str.isalnum, text))


def _goes_on(before: str) -> bool:
    """Whether a full stop behind `before` may stand inside a sentence."""
    if _MARK.fullmatch(before):
        return True
    word = before.split()[-1].lstrip("(\"'\u201c\u2018[*_") if before.split() else ""
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")
