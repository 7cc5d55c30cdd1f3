"""`reward.group.type: tournament` as a hook: a judge model compares the members of a group, their places are their rewards.

Invariant: a score belongs to the execution at the same place in the list. Equal answers tie without being asked about; a
verdict that is none (no [[A]], [[B]] or [[C]]) leaves no match and is not remembered. A judge that gave none at all has not
judged: the try has failed.
"""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import regex  # type: ignore[import-untyped]

from physarum.agents.rewards.answer import Answer, answer_of
from physarum.agents.rewards.backend import Backend, backend_for
from physarum.agents.rewards.chat import PATH, completion, filled, said
from physarum.agents.rewards.errors import BackendReplyError
from physarum.agents.rewards.tournaments.formats import FORMATS, Standing
from physarum.agents.rewards.tournaments.matches import Judge, in_both_orders
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution
from physarum.configs.reward_types import TournamentReward
from physarum.configs.types import Arguments

_log = logging.getLogger(__name__)

HOOK: Final = "physarum.agents.rewards.tournaments.judged:score"
_VERDICTS: Final = {"A": 1.0, "B": 0.0, "C": 0.5}
_MATCH_S: Final = 1.0


@dataclass(slots=True)
class Verdicts:
    """What came of the questions of one tournament."""

    given: int = 0
    missing: int = 0
    last: BackendReplyError | None = None
    """Of those that had no verdict."""

    def check(self, group: str) -> None:
        """Logs those that are missing. Raises BackendReplyError where none was given."""
        if self.last is None:
            return
        if not self.given:
            raise BackendReplyError(
                f"the judge gave no verdict on any of {self.missing} questions; the last: {self.last}"
            )
        asked = self.given + self.missing
        _log.warning("group %s: %d of %d questions had no verdict; the last: %s", group, self.missing, asked, self.last)


async def score(executions: list[Execution], *, args: Arguments, folder: str) -> list[float]:
    """Hook: the place of each as a score in [0, 1]; 0.5 for one that is alone. Raises what Backend.post raises (in a group),
    and BackendReplyError for a judge without any verdict."""
    if len(executions) == 1:
        return [0.5]
    options = TournamentReward.model_validate_json(orjson.dumps(args))
    tokenizer = FolderTokenizer(Path(folder))
    answers = [answer_of(one, tokenizer) for one in executions]
    verdicts = Verdicts()
    judge = asked(answers, options, backend_for(options), verdicts)
    extra = {name: value for name in ("anchors", "rounds") if (value := getattr(options, name)) is not None}
    # The same lots for the same group: a try that is repeated asks what is remembered.
    group = executions[0].task.group
    standing: Standing = await FORMATS[options.format](len(answers), judge, random.Random(group), **extra)
    verdicts.check(group)
    return standing.scores


def asked(answers: list[Answer], options: TournamentReward, backend: Backend, verdicts: Verdicts) -> Judge:
    """The judge over these answers, as tournaments ask it; `verdicts` counts."""

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
        try:
            outcome = await backend.post(question, functools.partial(verdict, options), PATH)
        except NoVerdictError as error:
            verdicts.missing += 1
            verdicts.last = error
            return None
        verdicts.given += 1
        return outcome

    return in_both_orders(judge) if options.both_orders else judge


class NoVerdictError(BackendReplyError):
    """The judge answered, and could not tell who is better."""


def verdict(options: TournamentReward, reply: Any) -> float:
    """1 for A, 0 for B, 0.5 for a tie. Raises NoVerdictError."""
    text = said(options, reply)
    try:
        return _VERDICTS[regex.findall(options.pattern, text, timeout=_MATCH_S)[-1].upper()]
    except (TimeoutError, IndexError, KeyError) as error:
        raise NoVerdictError(f"the judge said {text[-200:]!r}; expected a verdict as {options.pattern!r}") from error
