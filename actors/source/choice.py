"""What a source issues next: the rows in their order, as the curriculum (if any) changes, skips and sizes them.

Invariant: for equal positions and ordinals the answers are equal, so that what is issued again is what was issued.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from physarum.actors.source.admission import Sizes
from physarum.actors.source.curriculum import Lessons
from physarum.actors.source.cursor import Picked, RowCursor
from physarum.actors.source.errors import ChangedCurriculumError
from physarum.actors.source.rows import RowStream
from physarum.actors.states import SourcePosition
from physarum.configs.root import RootConfig
from physarum.configs.sampling import parameters

_log = logging.getLogger(__name__)

_LONGEST: Final = 1_000_000


class Choice:
    """Of one source; its methods read files or call hooks: keep them off the event loop."""

    def __init__(self, config: RootConfig, rows: RowStream, position: SourcePosition, lessons: Lessons | None) -> None:
        self._source, self._rows, self._lessons = config.source, rows, lessons
        self._sampling = parameters(config.rollout.sampling)
        self.cursor = RowCursor(rows, position.epoch, position.index, config.epochs)

    def pick(self, position: SourcePosition) -> Picked | None:
        """The next row; None after the last epoch, or after a whole one of which the curriculum let nothing pass (_LONGEST
        rows of a mixture, whose one epoch does not end)."""
        began: Picked | None = None
        while (picked := self.cursor.take()) is not None:
            if self._lessons is None:
                return picked
            row = self._lessons.row(position, position.issued, picked.epoch, picked.index, picked.row)
            if row is not None:
                return Picked(picked.epoch, picked.index, row)
            began = picked if began is None else began
            if picked.epoch > began.epoch + 1 or picked.index - began.index >= _LONGEST:
                tried = f"epoch {began.epoch + 1}" if picked.epoch > began.epoch else f"{_LONGEST} rows"
                _log.warning("the curriculum skipped every row of %s: nothing is left to issue", tried)
                return None
        return None

    def again(self, position: SourcePosition, ordinal: int, epoch: int, index: int) -> dict[str, Any]:
        """The row as it was issued under `ordinal`. Raises StageGoneError or ChangedCurriculumError."""
        row = self._rows.row(epoch, index)
        if self._lessons is None:
            return row
        found = self._lessons.row(position, ordinal, epoch, index, row)
        if found is None:
            raise ChangedCurriculumError(
                f"the curriculum skips row {epoch}/{index}, which it let be issued under the same state (ordinal {ordinal});"
                " expected a pure function of state and row. Correct `source.curriculum`"
            )
        return found

    def sizes(self, position: SourcePosition, oldest: int) -> Sizes:
        """`oldest`: the first ordinal that is out."""
        following = self.group_size_at(position, position.issued)
        if self._lessons is None or not position.stages:
            return Sizes(following, following)
        return Sizes(
            following, max(size or self._source.group_size for size in self._lessons.group_sizes(position, oldest))
        )

    def group_size_at(self, position: SourcePosition, ordinal: int) -> int:
        """Of the group that the task with `ordinal` belongs to."""
        chosen = self._lessons.group_size(position, ordinal) if self._lessons is not None and position.stages else None
        return self._source.group_size if chosen is None else chosen

    def sampling(self, position: SourcePosition, ordinal: int) -> dict[str, Any]:
        """Of the tasks from `ordinal` on."""
        return {**self._sampling, **({} if self._lessons is None else self._lessons.sampling(position, ordinal))}
