"""Regular expressions with a deadline, and tags by scanning.

A pattern that goes through exponentially many ways (`(a+)+$`) is stopped by the `regex` library's own timeout: the policy
chooses the text, so it must not choose how long a reward takes.
"""

from __future__ import annotations

import functools
import logging

import regex  # type: ignore[import-untyped]

from physarum.agents.rewards.answer import Answer
from physarum.configs.reward_types import FormatReward, RegexReward

_log = logging.getLogger(__name__)


def score_regex(answer: Answer, options: RegexReward) -> float:
    """1.0 where the pattern is found in time (it fits the whole text with `mode: fullmatch`), else 0.0."""
    pattern = _compiled(options.pattern)
    find = pattern.fullmatch if options.mode == "fullmatch" else pattern.search
    try:
        return float(find(answer.text, timeout=options.timeout_s) is not None)
    except TimeoutError:
        _log.warning(
            "task %s: pattern %.80r took more than %g s over %d characters and counts as not found",
            answer.task,
            options.pattern,
            options.timeout_s,
            len(answer.text),
        )
        return 0.0


def score_format(answer: Answer, options: FormatReward) -> float:
    """1.0 where the text is its tags' blocks and nothing else, else 0.0."""
    text = f"<{options.tags[0]}>{answer.text}" if options.opened else answer.text
    return float(_is_tagged(text, options.tags))


def _is_tagged(text: str, tags: tuple[str, ...]) -> bool:
    place = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return False
        start, end = text.find(opening, place), text.find(closing, place)
        if start < place or end < start or text[place:start].strip():
            return False
        place = end + len(closing)
    return not text[place:].strip()


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern)
