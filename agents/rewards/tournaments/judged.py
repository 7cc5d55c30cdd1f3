"""`reward.group.type: tournament` as a hook: a judge model compares the members of a group, their places are their rewards.

Invariant: a score belongs to the execution at the same place in the list. Equal answers tie without being asked about; a
verdict that is none (no [[A]], [[B]] or [[C]]) leaves no match.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any, Final

import orjson
import regex  # type: ignore[import-untyped]

from physarum.agents.rewards.answer import Answer, answer_of
from physarum.agents.rewards.backend import Backend, backend_for
from physarum.agents.rewards.chat import PATH, completion, filled, said
from physarum.agents.rewards.tournaments.formats import FORMATS, Standing
from physarum.agents.rewards.tournaments.matches import Judge, in_both_orders
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution
from physarum.configs.reward_types import TournamentReward
from physarum.configs.types import Arguments

HOOK: Final = "physarum.agents.rewards.tournaments.judged:score"
_VERDICTS: Final = {"A": 1.0, "B": 0.0, "C": 0.5}
_MATCH_S: Final = 1.0


async def score(executions: list[Execution], *, args: Arguments, folder: str) -> list[float]:
    """Hook: the place of each as a score in [0, 1]; 0.5 for one that is alone. Raises what Backend.post raises (in a group)."""
    if len(executions) == 1:
        return [0.5]
    options = TournamentReward.model_validate_json(orjson.dumps(args))
    tokenizer = FolderTokenizer(Path(folder))
    answers = [answer_of(one, tokenizer) for one in executions]
    judge = asked(answers, options, backend_for(options))
    extra = {name: value for name in ("anchors", "rounds") if (value := getattr(options, name)) is not None}
    # The same lots for the same group: a try that is repeated asks what is remembered.
    rng = random.Random(executions[0].task.group)
    standing: Standing = await FORMATS[options.format](len(answers), judge, rng, **extra)
    return standing.scores


def asked(answers: list[Answer], options: TournamentReward, backend: Backend) -> Judge:
    """The judge over these answers, as tournaments ask it."""

    async def judge(one: int, other: int) -> float | None:
        first, second = answers[one], answers[other]
        if first.text.strip() == second.text.strip():
            return 0.5
        values = {
            "prompt": first.prompt,
            "label": first.label,
            "response_a": first.text,
            "response_b": second.text,
            "transcript_a": first.transcript,
            "transcript_b": second.transcript,
        }
        question = completion(options, filled(options.template, values))
        return await backend.post(question, functools.partial(verdict, options), PATH)

    return in_both_orders(judge) if options.both_orders else judge


def verdict(options: TournamentReward, reply: Any) -> float | None:
    """1 for A, 0 for B, 0.5 for a tie; None where the judge gave none."""
    try:
        found = regex.findall(options.pattern, said(options, reply), timeout=_MATCH_S)
    except TimeoutError:
        return None
    return _VERDICTS.get(found[-1].upper()) if found else None
