"""The held-out problems: the first usable rows in their own order, the same at every evaluation of a run."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any, Final

from physarum.actors.eval_sets import source_name
from physarum.actors.evaluator.errors import NoProblemError
from physarum.actors.source.errors import BlankRowError, EpochEndError
from physarum.actors.source.opening import open_rows
from physarum.actors.source.tasks import check_travels, group_tasks
from physarum.bus.records import Task
from physarum.configs.data_files import RowError
from physarum.configs.evaluation import EvaluationSet
from physarum.configs.hooks import Hook, load_hook
from physarum.configs.root import RootConfig
from physarum.configs.rows import RowsConfig
from physarum.configs.types import Arguments

_log = logging.getLogger(__name__)

_NAMED: Final = 20
_LABEL_CHARS: Final = 100


def load_problems(
    config: RootConfig, name: str, part: EvaluationSet, limit_bytes: int | None = None
) -> list[dict[str, Any]]:
    """At most `problems` rows of a set (all where null). Broken ones, and those that make no message of `limit_bytes`, are
    counted, the first of them named, and skipped; none left raises NoProblemError."""
    rows = open_rows(
        part,
        config.run.seed,
        shuffle=False,
        base=_base(config),
        held_out=True,
        extra=_count(part.row_hook(held_out=True), part.problems),
    )
    found: list[dict[str, Any]] = []
    index = broken = 0
    wanted = math.inf if part.problems is None else part.problems
    while len(found) < wanted:
        try:
            row = rows.row(0, index)
            if limit_bytes is not None:
                check_travels(_sized(config, name, row), limit_bytes)
            found.append(row)
        except EpochEndError:
            break
        except BlankRowError:
            pass
        except RowError as error:
            broken += 1
            if broken <= _NAMED:
                _log.warning("the evaluation on %s skips a problem: %s", name, error)
        index += 1
    if broken > _NAMED:
        _log.warning("the evaluation on %s skips %d problems, of which the first %d are named", name, broken, _NAMED)
    if not found:
        raise NoProblemError(f"the evaluation on {name} found no usable problem in {index} rows; expected at least one")
    if part.problems is not None and len(found) < part.problems:
        _log.warning("the evaluation on %s has %d problems; it asks for %d", name, len(found), part.problems)
    return found


def _sized(config: RootConfig, name: str, row: dict[str, Any]) -> Task:
    """A task as large as the problem's will be."""
    place = {"source": source_name("0" * _LABEL_CHARS, name), "place": "0", "first_ordinal": 0}
    (task,) = group_tasks(row, run=config.run.name, group_size=1, sampling={}, task_class="eval", **place)
    return task


def _base(config: RootConfig) -> RowsConfig:
    """Whose columns and chat hold where a set has none: the evaluation's, then the source's."""
    source, evaluation = config.source, config.evaluation
    assert evaluation is not None  # this is about one of its sets
    own = {"columns": evaluation.columns or source.columns, "chat": evaluation.chat or source.chat}
    return source.model_copy(update=own)


def _count(hook: tuple[Hook, Arguments] | None, problems: int | None) -> Arguments:
    """How many problems are wanted, where the hook has a parameter `problems` that is not set."""
    if hook is None or problems is None or "problems" in hook[1]:
        return {}
    target = load_hook(hook[0])
    takes = callable(target) and "problems" in inspect.signature(target).parameters
    return {"problems": problems} if takes else {}
