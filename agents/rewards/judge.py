"""`judge`: a model reads prompt, response, label or the whole transcript, and its answer holds a score.

Invariant: a judge that gives no score, or one outside its range, has not judged: the try has failed, and nothing is scored 0
or remembered.
"""

from __future__ import annotations

import functools
from typing import Any

import regex  # type: ignore[import-untyped]

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.chat import PATH, completion, filled, said
from physarum.agents.rewards.errors import BackendReplyError
from physarum.configs.reward_types import JudgeReward

_MATCH_S = 1.0
"""For finding the score in the judge's answer."""


async def score_judge(answer: Answer, options: JudgeReward) -> float | None:
    """In [0, 1]. Raises what Backend.post raises, and BackendReplyError for an answer without a score."""
    values: dict[str, Any] = {"prompt": answer.prompt, "response": answer.text, "label": answer.label}
    values["transcript"] = answer.transcript
    question = completion(options, filled(options.template, values))
    return await backend_for(options).post(question, functools.partial(_score, options), PATH)


def _score(options: JudgeReward, reply: Any) -> float:
    text = said(options, reply)
    try:
        found = regex.findall(options.pattern, text, timeout=_MATCH_S)
        score = float(found[-1])
    except (TimeoutError, IndexError, ValueError) as error:
        raise BackendReplyError(f"the judge said {text[-200:]!r}; expected a score as {options.pattern!r}") from error
    if not options.low <= score <= options.high:
        raise BackendReplyError(f"the judge gave {score:g}; expected {options.low:g} to {options.high:g}")
    return (score - options.low) / (options.high - options.low)
