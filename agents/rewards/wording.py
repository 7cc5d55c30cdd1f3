"""Texts compared as texts: exact, and by the overlap of their words.

F1 is SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1; normalisation of its evaluation script: lower case,
no punctuation, no articles, single blanks), with HotpotQA's rule for yes and no (Yang et al. 2018, arXiv 1809.09600).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from physarum.agents.rewards.answer import Answer
from physarum.configs.reward_types import ExactReward, F1Reward, Normalisation

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_STEPS: Final[dict[str, Callable[[str], str]]] = {
    "unicode": lambda text: unicodedata.normalize("NFKC", text),
    "case": str.casefold,
    "articles": lambda text: _ARTICLES.sub(" ", text),
    "punctuation": lambda text: text.translate(_PUNCTUATION),
    "whitespace": lambda text: " ".join(text.split()),
}
_SQUAD: Final[tuple[Normalisation, ...]] = ("case", "punctuation", "articles", "whitespace")
_WHOLE: Final = frozenset({"yes", "no", "noanswer"})


def normalised(text: str, steps: Sequence[Normalisation]) -> str:
    for step in steps:
        text = _STEPS[step](text)
    return text


def score_exact(answer: Answer, options: ExactReward) -> float:
    """1.0 where the whole answer equals the label (or one of several), both normalised."""
    said = normalised(answer.text, options.normalise)
    return float(any(said == normalised(label, options.normalise) for label in answer.labels()))


def score_f1(answer: Answer, options: F1Reward) -> float:
    """In [0, 1]; the best over several labels."""
    said = normalised(answer.text, _SQUAD)
    return max(_f1(said, normalised(label, _SQUAD), options.yes_no) for label in answer.labels())


def _f1(said: str, label: str, yes_no: bool) -> float:
    """2 P R / (P + R) over the words that both have, as often as both have them."""
    if yes_no and said != label and (said in _WHOLE or label in _WHOLE):
        return 0.0
    words, wanted = said.split(), label.split()
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2.0 * common / (len(words) + len(wanted))
