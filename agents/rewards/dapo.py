"""DAPO's rule: the last `Answer: ...` near the end, read as an integer (Yu et al. 2025, arXiv 2503.14476, section 3.5).

The convention: only the last 300 characters, the last line that says `Answer:`, units and LaTeX dress taken off as for
Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1), right 1, wrong -1. Answers of its data are integers.
"""

from __future__ import annotations

import re
from typing import Final

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.errors import RewardError
from physarum.configs.reward_types import DapoReward

_ANSWER: Final = re.compile(r"answer\s{0,8}:\s{0,8}([^\n]+)", re.IGNORECASE)
_DRESS: Final = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mbox)\b|[{}$*\s]|\\[,;!()\[\]]")
_INTEGER: Final = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")
_UNIT: Final = re.compile(r"(?:\^?[a-z]+|°|%)?\.?", re.IGNORECASE)


def score_dapo(answer: Answer, options: DapoReward) -> float:
    """`options.right` or `options.wrong`. Raises RewardError for a label that is no integer."""
    wanted = [_whole(label, answer.task) for label in answer.labels()]
    said = _ANSWER.findall(answer.text[-options.tail_chars :])
    number = integer_in(said[-1]) if said else None
    return options.right if number is not None and number in wanted else options.wrong


def integer_in(text: str) -> int | None:
    """The integer that `text` is but for its dress: `$\\boxed{1,024}$`, `x = 72 dollars`, `90^\\circ`. None for all else."""
    plain = _DRESS.sub("", text.rpartition("=")[2]).replace("\\", "")
    found = _INTEGER.match(plain)
    if found is None or not _UNIT.fullmatch(plain, found.end()):
        return None
    return int(found[1] + found[2].replace(",", ""))


def _whole(label: str, task: str) -> int:
    number = integer_in(label)
    if number is None:
        raise RewardError(f"task {task} has the label {label!r:.80}; expected an integer, as DAPO's data has")
    return number
