"""The curriculum of a source: its state moves with the ledger, is stored before it is used, and is known for every task out.

    plans in LEDGER --outcomes--> observe(state) --stored with the position (compare-and-set)--> rows, group size, sampling

Invariant: a task is issued, and issued again, under the stage that was stored before its ordinal; whoever starts anew comes
to the same rows. A plan is observed once: plans are recorded once and replayed verbatim.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import msgspec

from physarum.actors.source import places
from physarum.actors.source.errors import StageGoneError
from physarum.actors.states import CurriculumStage, SourcePosition
from physarum.agents.protocols import Curriculum, Outcome
from physarum.bus.ledger import Dropped, Numbered, Planned, PlanRecord
from physarum.configs.hooks import load_hook
from physarum.configs.source import CurriculumConfig

_log = logging.getLogger(__name__)

_JUDGED = ("filtered", "over_age", "incomplete")
"""Reasons of drops whose reward says something of their task."""


class Lessons:
    """One source's curriculum and the plans that it has yet to observe. All but `record` calls the user's hook: keep it off
    the event loop."""

    def __init__(self, chosen: CurriculumConfig, source: str, seed: int) -> None:
        self._hook: Curriculum = load_hook(chosen.hook)(seed, **chosen.args)  # type: ignore[operator]
        self._source = source
        self._plans: deque[tuple[int, PlanRecord]] = deque()

    def record(self, item: Numbered) -> None:
        """One record of LEDGER."""
        if isinstance(item.record, PlanRecord):
            self._plans.append((item.sequence, item.record))

    @property
    def behind(self) -> bool:
        """Whether a plan was recorded that is not observed yet."""
        return bool(self._plans)

    def advanced(self, position: SourcePosition, oldest: int) -> SourcePosition | None:
        """The position with what was recorded since folded in; None where nothing was. Store it before issuing more.

        `oldest`: the first ordinal that may be issued again, or whose outcome is still to come."""
        stages, through = list(position.stages), position.observed_through
        if not stages:
            stages = [CurriculumStage(0, self._hook.initial())]
        while self._plans:
            sequence, plan = self._plans.popleft()
            if sequence <= through:
                continue
            through = sequence
            state = self._hook.observe(stages[-1].state, self._outcomes(plan, stages))
            if state != stages[-1].state:
                stages.append(CurriculumStage(position.issued, state))
        if through == position.observed_through and position.stages:
            return None
        return msgspec.structs.replace(position, stages=_needed(stages, oldest), observed_through=through)

    def row(
        self, position: SourcePosition, ordinal: int, epoch: int, index: int, row: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The row to issue with first ordinal `ordinal`; None: it is skipped."""
        return self._hook.row(_state_at(position.stages, ordinal), epoch, index, row)

    def group_size(self, position: SourcePosition, ordinal: int) -> int | None:
        """Of the group that `ordinal` belongs to; None: as configured."""
        return self._hook.group_size(_state_at(position.stages, ordinal))

    def group_sizes(self, position: SourcePosition, oldest: int) -> list[int | None]:
        """Of every stage under which `oldest` or a later task was issued."""
        return [self._hook.group_size(stage.state) for stage in _needed(position.stages, oldest)]

    def sampling(self, position: SourcePosition, ordinal: int) -> dict[str, Any]:
        """Laid over what is configured."""
        return dict(self._hook.sampling(_state_at(position.stages, ordinal)))

    def _outcomes(self, plan: PlanRecord, stages: list[CurriculumStage]) -> list[Outcome]:
        """By group, in the plan's order."""
        groups: dict[str, list[Planned | Dropped]] = {}
        judged: list[Planned | Dropped] = [*plan.executions, *(gone for gone in plan.dropped if gone.reason in _JUDGED)]
        for place in judged:
            if place.source == self._source and place.reward is not None:
                groups.setdefault(_group_of(place), []).append(place)
        found = (_outcome(name, members, plan.at_number, stages) for name, members in groups.items())
        return [one for one in found if one is not None]


def _outcome(name: str, members: list[Planned | Dropped], number: int, stages: list[CurriculumStage]) -> Outcome | None:
    """None for a row that was added at run time, which no curriculum chose, and for a group that comes after its stage was
    forgotten: a task that was given up and sent on its way by hand."""
    epoch, index = places.read(name)
    if epoch == places.ADDED:
        return None
    first = min(one.ordinal for one in members)
    rewards = [one.reward for one in members if one.reward is not None]
    try:
        state = _state_at(stages, first)
    except StageGoneError as error:
        _log.warning("the curriculum learns nothing from group %s, which had been given up: %s", name, error)
        return None
    return Outcome(epoch=epoch, index=index, state=state, rewards=rewards, number=number)


def _group_of(place: Planned | Dropped) -> str:
    return place.group if isinstance(place, Planned) else place.task.rpartition("/")[0]


def _state_at(stages: list[CurriculumStage], ordinal: int) -> Any:
    """Of the newest stage that began at or before `ordinal`. Raises StageGoneError."""
    for stage in reversed(stages):
        if stage.first <= ordinal:
            return stage.state
    raise StageGoneError(
        f"ordinal {ordinal} was issued under a stage of the curriculum that the source's position no longer holds; it holds"
        f" those from ordinals {[stage.first for stage in stages]} on. Go on from a checkpoint of before, or without"
        " `source.curriculum`"
    )


def _needed(stages: list[CurriculumStage], oldest: int) -> list[CurriculumStage]:
    """The newest of those that began at the same ordinal, from the one on under which `oldest` was issued."""
    newest = [
        stage
        for stage, later in zip(stages, [*stages[1:], None], strict=True)
        if later is None or later.first > stage.first
    ]
    begun = [place for place, stage in enumerate(newest) if stage.first <= oldest]
    return newest[begun[-1] if begun else 0 :]
