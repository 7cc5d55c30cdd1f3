"""The state of one set's evaluation: which answers came, are dead or open. Pure; fed with headers and dead letters."""

from __future__ import annotations

from collections.abc import Sequence

from physarum.actors.evaluator.passes import pass_at
from physarum.actors.states import SetScore
from physarum.bus.records import ExecutionHeader, SampleHeader, Task
from physarum.configs.evaluation import EvaluationSet


class Tally:
    """`tasks`: of one evaluation's own source, so that whatever an earlier, abandoned one left behind is not counted."""

    def __init__(self, part: EvaluationSet, label: str, tasks: Sequence[Task]) -> None:
        self._part, self._label = part, label
        self._open = {task.id: task.group for task in tasks}
        self._asked = len(tasks)
        self._rewards: dict[str, list[float]] = {task.group: [] for task in tasks}
        self._off_version = 0
        self.dead = 0

    @property
    def missing(self) -> int:
        """Answers that have neither a result nor a dead letter."""
        return len(self._open)

    def result(self, header: ExecutionHeader) -> None:
        """A scored execution; a second one of the same task, or one without a reward, is not counted."""
        group = self._open.pop(header.task, None)
        if group is None:
            return
        if header.reward is not None:
            self._rewards[group].append(header.reward)
        self._off_version += any(self._other_version(sample) for sample in header.samples)

    def buried(self, task: str) -> None:
        """A task that could not be processed."""
        self.dead += self._open.pop(task, None) is not None

    def score(self) -> SetScore:
        """Mean reward over all answers that were asked for; those without a result count 0."""
        part, rewards = self._part, list(self._rewards.values())
        solved = [sum(reward >= part.solved_at for reward in found) for found in rewards]
        return SetScore(
            score=sum(map(sum, rewards)) / self._asked,
            problems=len(rewards),
            samples=part.samples,
            scored=sum(map(len, rewards)),
            off_version=self._off_version,
            pass_at={k: pass_at(k, part.samples, solved) for k in part.pass_at},
        )

    def _other_version(self, sample: SampleHeader) -> bool:
        return any(span.version != self._label for span in sample.spans)
