"""Which executions make the next step: decided from headers alone, in the order in which groups became complete.

Pure and deterministic: the same headers and deaths in the same order give the same plans. Every execution that enters
leaves in exactly one plan, as trained, masked or dropped with a reason.

    headers, in log order --> groups --complete--> queue --take()--> PlanRecord
    dead letters -----------^   (a dead member closes its place)
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from physarum.actors.trainer.algorithms.advantages import group_relative_advantages
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import Dropped, Mask, Planned, PlanRecord
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Fork, Version, age


class PlanRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes and how old a token with gradient may be (`bound` None: any age)."""

    groups_per_batch: int
    bound: int | None
    normalize_std: bool
    objective: str
    max_sequence_tokens: int


class Arrived(msgspec.Struct, frozen=True):
    """An execution as the log has it."""

    sequence: int
    header: ExecutionHeader


class _Group(msgspec.Struct):
    size: int
    members: dict[int, Arrived] = {}
    dead: set[int] = set()

    @property
    def closed(self) -> bool:
        return len(self.members.keys() | self.dead) >= self.size


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
    """Groups executions and forms plans. `disposed` holds the ordinals, per source, that left in earlier plans."""

    def __init__(self, rules: PlanRules, disposed: dict[str, IntervalSet] | None = None) -> None:
        self._rules = rules
        self._disposed = disposed if disposed is not None else {}
        self._groups: dict[str, _Group] = {}
        self._complete: deque[str] = deque()
        self._dropped: list[Dropped] = []
        self._early_deaths: dict[str, set[int]] = {}

    @property
    def ready(self) -> bool:
        """Whether a plan can be taken now."""
        return len(self._complete) >= self._rules.groups_per_batch

    @property
    def waiting_executions(self) -> int:
        return sum(len(group.members) for group in self._groups.values())

    @property
    def complete_groups(self) -> int:
        return len(self._complete)

    def admit(self, arrived: Arrived) -> None:
        """Takes one execution. The first complete one of a task counts; others are dropped(duplicate)."""
        header = arrived.header
        if header.ordinal in self._disposed.get(header.source, ()):
            self._drop(arrived, "duplicate")
            return
        if any(sample.tokens > self._rules.max_sequence_tokens for sample in header.samples):
            self._drop(arrived, "too_long")
            self.bury(header.group, header.group_size, header.member)
            return
        group = self._group(header.group, header.group_size)
        if header.member in group.members or header.member in group.dead:
            self._drop(arrived, "duplicate")
            return
        was_closed = group.closed
        group.members[header.member] = arrived
        self._note(header.group, group, was_closed)

    def bury(self, name: str, size: int, member: int) -> None:
        """A member will not come (it was dead-lettered or dropped): its group closes without it."""
        group = self._group(name, size)
        if member in group.members or member in group.dead:
            return
        was_closed = group.closed
        group.dead.add(member)
        self._note(name, group, was_closed)

    def take(self, epoch: int, at_number: int, forks: tuple[Fork, ...]) -> Plan:
        """The next plan, its masks final for a step that leaves `at_number`. Call only when `ready`."""
        groups = [self._groups.pop(self._complete.popleft()) for _ in range(self._rules.groups_per_batch)]
        arrived = [group.members[member] for group in groups for member in sorted(group.members)]
        advantages = self._advantages(arrived)
        tally = _Tally(at_number, forks, self._rules.bound)
        planned = [tally.plan(item, advantage) for item, advantage in zip(arrived, advantages, strict=True)]
        dropped, self._dropped = self._dropped, []
        record = PlanRecord(epoch=epoch, at_number=at_number, executions=planned, dropped=dropped)
        for gone in record.places:
            self._disposed.setdefault(gone.source, IntervalSet()).add(gone.ordinal)
        return Plan(
            record=record,
            ages=tally.ages,
            multi_version_samples=tally.multi_version_samples,
            reward_mean=_mean_reward(arrived),
        )

    def _advantages(self, arrived: list[Arrived]) -> list[float]:
        if self._rules.objective != "grpo":
            return [0.0] * len(arrived)
        rewards = [_reward(item.header) for item in arrived]
        groups = [item.header.group for item in arrived]
        relative: list[float] = group_relative_advantages(rewards, groups, self._rules.normalize_std).tolist()
        return relative

    def _group(self, name: str, size: int) -> _Group:
        if name not in self._groups:
            self._groups[name] = _Group(size)
        return self._groups[name]

    def _note(self, name: str, group: _Group, was_closed: bool) -> None:
        if was_closed or not group.closed:
            return
        if group.members:
            self._complete.append(name)
        else:
            del self._groups[name]  # every member is dead: nothing to train, and each is accounted as dead

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
