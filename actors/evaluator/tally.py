"""The state of one evaluation: which problems are answered, dead or open. Pure; fed with headers and dead letters."""

from __future__ import annotations

from physarum.actors.states import EvalScore
from physarum.bus.records import ExecutionHeader, SampleHeader


class Tally:
    """`source` is this evaluation's own name: whatever an earlier, abandoned one left behind is not counted."""

    def __init__(self, source: str, label: str, tasks: list[str]) -> None:
        self._source, self._label = source, label
        self._open = set(tasks)
        self._problems = len(tasks)
        self._rewards: list[float] = []
        self._off_version = 0
        self.dead = 0

    @property
    def missing(self) -> int:
        """Problems that have neither a result nor a dead letter."""
        return len(self._open)

    def result(self, header: ExecutionHeader) -> None:
        """A scored execution; a second one of the same task, or one without a reward, is not counted."""
        if header.source != self._source or header.task not in self._open:
            return
        self._open.discard(header.task)
        rewards = [sample.reward for sample in header.samples if sample.reward is not None]
        if rewards:
            self._rewards.append(sum(rewards) / len(rewards))
        self._off_version += any(self._other_version(sample) for sample in header.samples)

    def buried(self, source: str | None, task: str) -> None:
        """A task of this evaluation that could not be processed."""
        if source == self._source and task in self._open:
            self._open.discard(task)
            self.dead += 1

    def score(self, started_at: float, finished_at: float) -> EvalScore:
        """Mean reward over all problems; those without a result count 0."""
        return EvalScore(
            version=self._label,
            score=sum(self._rewards) / self._problems,
            problems=self._problems,
            scored=len(self._rewards),
            off_version=self._off_version,
            started_at=started_at,
            finished_at=finished_at,
        )

    def _other_version(self, sample: SampleHeader) -> bool:
        return any(span.version != self._label for span in sample.spans)
