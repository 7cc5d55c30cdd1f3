"""Which executions make the next step: decided from headers alone, in the order in which groups became complete.

Pure and deterministic: the same headers and deaths in the same order give the same plans. Every execution that enters
leaves in exactly one plan, as trained, masked or dropped with a reason.

    headers, in log order --> groups --complete, or closed by death or deadline--> take() --> PlanRecord
    dead letters -----------^
"""

from __future__ import annotations

import msgspec
import numpy as np

from physarum.actors.trainer.algorithms.advantages import group_relative_advantages
from physarum.actors.trainer.groups import Arrived, DeadMember, GroupRules, Groups
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import Dropped, GroupClosedRecord, Mask, Planned, PlanRecord, RefillRecord, lineage
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Fork, Version, age


class PlanRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes and how old a token with gradient may be (`bound` None: any age).

    `ordered`: the groups of a batch stand in the source's order, not in that of their completion."""

    groups_per_batch: int
    bound: int | None
    normalize_std: bool
    objective: str
    max_sequence_tokens: int
    groups: GroupRules = GroupRules()
    ordered: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what it costs to know of it besides the record: ages by token, versions and rewards."""

    record: PlanRecord
    ages: dict[int, int]
    multi_version_samples: int
    reward_mean: float | None

    @classmethod
    def recorded(cls, record: PlanRecord, headers: list[ExecutionHeader], forks: tuple[Fork, ...]) -> Plan:
        """A plan that was recorded earlier, with its counts computed anew; its masks and advantages are not touched."""
        tally = _Tally(record.at_number, forks, None)
        for planned, header in zip(record.executions, headers, strict=True):
            tally.count(planned, header)
        arrived = [Arrived(item.sequence, header) for item, header in zip(record.executions, headers, strict=True)]
        return cls(
            record=record,
            ages=tally.ages,
            multi_version_samples=tally.multi_version_samples,
            reward_mean=_mean_reward(arrived),
        )

    @property
    def trained(self) -> int:
        return sum(1 for item in self.record.executions if item.trained_tokens > 0)

    @property
    def masked(self) -> int:
        return len(self.record.executions) - self.trained


class Planner:
    """Forms plans from groups. `disposed` holds the ordinals, per lineage, that left in earlier plans."""

    def __init__(self, rules: PlanRules, disposed: dict[str, IntervalSet] | None = None) -> None:
        self._rules = rules
        self._disposed = disposed if disposed is not None else {}
        self._dropped: list[Dropped] = []
        self.groups = Groups(rules.groups)

    @property
    def ready(self) -> bool:
        """Whether a plan can be taken now."""
        return self.groups.complete >= self._rules.groups_per_batch

    @property
    def has_rest(self) -> bool:
        """Whether a last, smaller plan can be taken: complete groups, or drops that no plan has recorded yet."""
        return self.groups.complete > 0 or any(gone.reason != "duplicate" for gone in self._dropped)

    @property
    def has_drops(self) -> bool:
        """Whether drops wait for a plan to record them; until then the log keeps their samples."""
        return bool(self._dropped)

    def admit(self, arrived: Arrived, now: float = 0.0) -> None:
        """Takes one execution (`now`: monotonic seconds). The first one of a task counts; others are dropped by name."""
        header = arrived.header
        refused = self._left_before(header) or self._too_long(header, now) or self.groups.admit(arrived, now)
        if refused is not None:
            self._drop(arrived, refused)

    def bury(self, dead: DeadMember, now: float = 0.0) -> RefillRecord | None:
        """A member was dead-lettered; returns the refill to record, if one is due."""
        if self._any_attempt_left(dead.source, dead.ordinal, dead.attempt):
            return None
        return self.groups.bury(dead, now)

    def revive(self, dead: DeadMember, now: float = 0.0) -> None:
        """A dead member was sent on its way again (`actorctl dead retry`)."""
        if not self._any_attempt_left(dead.source, dead.ordinal, dead.attempt):
            self.groups.revive(dead, now)

    def apply(self, record: GroupClosedRecord | RefillRecord) -> None:
        """Applies what was recorded in LEDGER."""
        if isinstance(record, RefillRecord):
            self.groups.asked(record)
            return
        for arrived in self.groups.close(record):
            self._drop(arrived, "incomplete")

    def take(self, epoch: int, at_number: int, forks: tuple[Fork, ...]) -> Plan:
        """The next plan, its masks final for a step that leaves `at_number`. Call only when `ready`."""
        groups = self.groups.take(self._rules.groups_per_batch)
        if self._rules.ordered:
            groups.sort(key=lambda group: min(item.header.ordinal for item in group.members.values()))
        arrived = [group.members[member] for group in groups for member in sorted(group.members)]
        advantages = self._advantages(arrived)
        tally = _Tally(at_number, forks, self._rules.bound)
        planned = [tally.plan(item, advantage) for item, advantage in zip(arrived, advantages, strict=True)]
        dropped, self._dropped = self._dropped, []
        record = PlanRecord(epoch=epoch, at_number=at_number, executions=planned, dropped=dropped)
        for gone in record.places:
            self._disposed.setdefault(gone.lineage, IntervalSet()).add(gone.ordinal)
        return Plan(
            record=record,
            ages=tally.ages,
            multi_version_samples=tally.multi_version_samples,
            reward_mean=_mean_reward(arrived),
        )

    def _left_before(self, header: ExecutionHeader) -> str | None:
        if header.ordinal in self._disposed.get(lineage(header.source, header.attempt), ()):
            return "duplicate"
        return "late" if self._any_attempt_left(header.source, header.ordinal, header.attempt) else None

    def _any_attempt_left(self, source: str, ordinal: int, attempt: int) -> bool:
        attempts = range(max(attempt, self._rules.groups.refills) + 1)
        return any(ordinal in self._disposed.get(lineage(source, one), ()) for one in attempts)

    def _too_long(self, header: ExecutionHeader, now: float) -> str | None:
        """A sequence above the token budget cannot be trained at all; its group goes on without it."""
        if all(sample.tokens <= self._rules.max_sequence_tokens for sample in header.samples):
            return None
        self.groups.give_up(header.group, header.group_size, header.member, now)
        return "too_long"

    def _advantages(self, arrived: list[Arrived]) -> list[float]:
        if self._rules.objective != "grpo" or not arrived:
            return [0.0] * len(arrived)
        rewards = [_reward(item.header) for item in arrived]
        groups = [item.header.group for item in arrived]
        relative: list[float] = group_relative_advantages(rewards, groups, self._rules.normalize_std).tolist()
        return relative

    def _drop(self, arrived: Arrived, reason: str) -> None:
        header = arrived.header
        self._dropped.append(
            Dropped(arrived.sequence, header.task, header.source, header.ordinal, header.attempt, reason)
        )


class _Tally:
    """Masks by age and the counts that go with them."""

    def __init__(self, at_number: int, forks: tuple[Fork, ...], bound: int | None) -> None:
        self._at_number, self._forks, self._bound = at_number, forks, bound
        self.ages: dict[int, int] = {}
        self.multi_version_samples = 0

    def plan(self, arrived: Arrived, advantage: float) -> Planned:
        header = arrived.header
        masks: list[Mask] = []
        masked = 0
        for number, sample in enumerate(header.samples):
            self.multi_version_samples += len({span.version for span in sample.spans}) > 1
            masked += self._mask(number, sample, masks)
        return Planned(
            sequence=arrived.sequence,
            task=header.task,
            source=header.source,
            ordinal=header.ordinal,
            attempt=header.attempt,
            group=header.group,
            advantage=advantage,
            trained_tokens=header.trainable - masked,
            masked_tokens=masked,
            masks=masks,
        )

    def count(self, planned: Planned, header: ExecutionHeader) -> None:
        """Ages and versions of a recorded plan's tokens that are not masked."""
        masked = {(mask.sample, mask.start) for mask in planned.masks}
        for number, sample in enumerate(header.samples):
            self.multi_version_samples += len({span.version for span in sample.spans}) > 1
            for span, tokens in zip(sample.spans, sample.span_trainable, strict=True):
                if tokens and (number, span.start) not in masked:
                    years = age(Version.parse(span.version), self._at_number, self._forks)
                    self.ages[years] = self.ages.get(years, 0) + tokens

    def _mask(self, number: int, sample: SampleHeader, masks: list[Mask]) -> int:
        masked = 0
        for span, tokens in zip(sample.spans, sample.span_trainable, strict=True):
            years = age(Version.parse(span.version), self._at_number, self._forks)
            if tokens and self._bound is not None and years > self._bound:
                masks.append(Mask(number, span.start, span.end))
                masked += tokens
            elif tokens:
                self.ages[years] = self.ages.get(years, 0) + tokens
        return masked


def _reward(header: ExecutionHeader) -> float:
    """An execution's reward: the mean over its samples, so that fan-out counts it once."""
    rewards = [sample.reward for sample in header.samples if sample.reward is not None]
    return float(np.mean(rewards)) if rewards else 0.0


def _mean_reward(arrived: list[Arrived]) -> float | None:
    scored = [_reward(item.header) for item in arrived if any(s.reward is not None for s in item.header.samples)]
    return float(np.mean(scored)) if scored else None
