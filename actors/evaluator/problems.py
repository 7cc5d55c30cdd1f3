"""The held-out problems: the first usable rows in their own order, the same at every evaluation of a run."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from physarum.actors.evaluator.errors import NoProblemError
from physarum.actors.source.errors import BlankRowError, EpochEndError
from physarum.actors.source.opening import open_rows
from physarum.configs.data_files import RowError
from physarum.configs.evaluation import EvaluationConfig
from physarum.configs.hooks import Hook, load_hook
from physarum.configs.root import RootConfig
from physarum.configs.types import Arguments

_log = logging.getLogger(__name__)


def load_problems(config: RootConfig, evaluation: EvaluationConfig) -> list[dict[str, Any]]:
    """At most `evaluation.problems` rows. Broken ones are named and skipped; none at all raises NoProblemError."""
    rows = open_rows(
        evaluation,
        config.run.seed,
        shuffle=False,
        base=config.source,
        held_out=True,
        extra=_count(evaluation.row_hook(held_out=True), evaluation.problems),
    )
    found: list[dict[str, Any]] = []
    index = 0
    while len(found) < evaluation.problems:
        try:
            found.append(rows.row(0, index))
        except EpochEndError:
            break
        except BlankRowError:
            pass
        except RowError as error:
            _log.warning("problem skipped: %s", error)
        index += 1
    if not found:
        raise NoProblemError(f"the evaluation found no usable problem in {index} rows; expected {evaluation.problems}")
    if len(found) < evaluation.problems:
        _log.warning("the evaluation has %d problems; evaluation.problems asks for %d", len(found), evaluation.problems)
    return found


def _count(hook: tuple[Hook, Arguments] | None, problems: int) -> Arguments:
    """How many problems are wanted, where the hook has a parameter `problems` that is not set."""
    if hook is None or "problems" in hook[1]:
        return {}
    target = load_hook(hook[0])
    takes = callable(target) and "problems" in inspect.signature(target).parameters
    return {"problems": problems} if takes else {}
