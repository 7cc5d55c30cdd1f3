"""`reward.type` as a hook: which function scores a row, and with which options.

    metadata.rm_type, else reward.type --> boxed_? --> function(answer, options of row_types, of args, or defaults)

Invariant: a type's module is imported when the first row asks for it, so a run needs only the libraries of its own types.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import orjson

from physarum.agents.protocols import RewardValue
from physarum.agents.rewards.answer import Answer, answer_of
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.extraction import last_boxed
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution
from physarum.configs.reward_rules import read_options
from physarum.configs.reward_types import BOXED, SELF_CONTAINED, canonical, remedy_for
from physarum.configs.types import Arguments, Section

HOOK: Final = "physarum.agents.rewards.scoring:score"
ROW_KEY: Final = "rm_type"
_PACKAGE: Final = "physarum.agents.rewards"
_FUNCTIONS: Final = {
    "math": "mathematics.score_math",
    "deepscaler": "mathematics.score_deepscaler",
    "dapo": "dapo.score_dapo",
    "exact": "wording.score_exact",
    "f1": "wording.score_f1",
    "choice": "choice.score_choice",
    "regex": "patterns.score_regex",
    "format": "patterns.score_format",
    "ifbench": "instructions.score_instructions",
    "remote_rm": "remote.score_remote",
    "code": "code.score_code",
    "judge": "judge.score_judge",
    "classifier": "classifier.score_classifier",
}

Scorer = Callable[[Answer, Any], Any]


async def score(
    execution: Execution, *, name: str, args: Arguments, row_types: dict[str, Arguments], folder: str
) -> RewardValue:
    """Hook: the ready-made reward `name`, or the one that the row names. `folder` holds the model's tokenizer.

    Raises RewardError for a row that cannot be scored; what a function raises is the execution's failed try.
    """
    answer = answer_of(execution, _tokenizer(folder))
    chosen = row_type(answer, name, row_types)
    if chosen.startswith(BOXED):
        answer = answer.with_text(last_boxed(answer.text) or "")
    given = args if chosen == name else row_types.get(chosen, {})
    value: Any = _function(chosen.removeprefix(BOXED))(answer, _options(chosen, given))
    made: RewardValue = await value if inspect.isawaitable(value) else value
    return made


def row_type(answer: Answer, default: str, row_types: dict[str, Arguments]) -> str:
    """The row's own type where it names one. Raises RewardError for one that is unknown, or that needs options and has none."""
    named = answer.metadata.get(ROW_KEY)
    if named is None or (isinstance(named, str) and not named.strip()):
        return default
    known = canonical(named.strip()) if isinstance(named, str) else None
    if known is None:
        remedy = remedy_for(named) if isinstance(named, str) else "write a text"
        raise RewardError(f"task {answer.task} names metadata.rm_type {named!r:.80}, which is no reward; {remedy}")
    if known == default or known in row_types or known.removeprefix(BOXED) in SELF_CONTAINED:
        return known
    raise RewardError(
        f"task {answer.task} names metadata.rm_type {named!r}, which the run does not allow its rows; expected it in"
        f" reward.row_types. Remedy: add `reward.row_types.{known}: {{...}}`"
    )


def _options(name: str, args: Arguments) -> Section:
    return _read_options(name, orjson.dumps(args, option=orjson.OPT_SORT_KEYS))


@functools.lru_cache(maxsize=64)
def _read_options(name: str, args_json: bytes) -> Section:
    return read_options(name, args_json)


@functools.cache
def _function(name: str) -> Scorer:
    module, _, attribute = _FUNCTIONS[name].rpartition(".")
    found: Scorer = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)
    return found


@functools.cache
def _tokenizer(folder: str) -> FolderTokenizer:
    return FolderTokenizer(Path(folder))
