"""The age of a planned step's tokens: what is masked, what is too old, and the counts that go with it. Pure.

Age is measured at consumption, against the number of the weights that the step is about to change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgspec

from physarum.actors.trainer.groups import Arrived
from physarum.bus.ledger import Mask, Planned
from physarum.bus.records import ExecutionHeader, SampleHeader
from physarum.bus.version import Fork, Version, age
from physarum.bus.version import is_withdrawn as version_withdrawn
from physarum.configs.age import Consumption


class AgeRules(msgspec.Struct, frozen=True, kw_only=True):
    """As in `configs.age`, for one stream. `bound` None: any age. `aborts`: executions may come cut off as hopeless."""

    bound: int | None
    consumption: Consumption = "mask"
    aborts: bool = False

    @property
    def masks(self) -> bool:
        """Whether a token over the bound loses its gradient, if it comes to that: always, but where it is trained."""
        return self.bound is not None and self.consumption != "train"

    def is_over(self, years: int) -> bool:
        return self.bound is not None and years > self.bound

    def cut_off(self, header: ExecutionHeader) -> bool:
        """Whether a rollout worker gave this execution up because it could no longer meet the bound."""
        return self.aborts and all(one.status == "aborted" and not one.trainable for one in header.samples)


class Clock(msgspec.Struct, frozen=True):
    """The moment at which ages are measured: the number of the weights, and the forks so far."""

    at_number: int
    forks: tuple[Fork, ...]

    def spans(self, sample: SampleHeader) -> Iterator[tuple[int, int, int, int]]:
        """(Age, start, end, trainable tokens) of each span."""
        for span, tokens in zip(sample.spans, sample.span_trainable, strict=True):
            yield _years(span.version, self.at_number, self.forks), span.start, span.end, tokens

    def holds_over(self, header: ExecutionHeader, rules: AgeRules) -> bool:
        """Whether a token that would carry gradient is over the bound."""
        return any(
            tokens and rules.is_over(years) for sample in header.samples for years, _, _, tokens in self.spans(sample)
        )

    def pairable(self, header: ExecutionHeader, rules: AgeRules) -> int | None:
        """The first sample that has a token left to train; None: there is none."""
        for number, sample in enumerate(header.samples):
            old = sum(tokens for years, _, _, tokens in self.spans(sample) if rules.masks and rules.is_over(years))
            if sample.trainable > old:
                return number
        return None


class Tally:
    """Masks by age and the counts that go with them. `ages`: tokens with gradient by age; `over_age`: those over the bound."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ages: dict[int, int] = {}
        self.over_age = 0
        self.multi_version_samples = 0

    def plan(self, arrived: Arrived, advantage: float | None, rules: AgeRules, only: int | None = None) -> Planned:
        """`advantage` None: nothing of it is trained, so all of it is masked; `only`: one sample alone is trained."""
        header = arrived.header
        masks: list[Mask] = []
        masked = 0
        for number, sample in enumerate(header.samples):
            self._count_versions(sample)
            if advantage is None or only not in (None, number):
                if sample.trainable:
                    masks.append(Mask(number, 0, sample.response))
                    masked += sample.trainable
                continue
            for years, start, end, tokens in self._clock.spans(sample):
                if tokens and rules.masks and rules.is_over(years):
                    masks.append(Mask(number, start, end))
                    masked += tokens
                else:
                    self._count(years, tokens, rules)
        return Planned(
            sequence=arrived.sequence,
            task=header.task,
            source=header.source,
            ordinal=header.ordinal,
            attempt=header.attempt,
            group=header.group,
            advantage=0.0 if advantage is None else advantage,
            trained_tokens=header.trainable - masked,
            masked_tokens=masked,
            masks=masks,
            reward=header.reward,
        )

    def count(self, planned: Planned, header: ExecutionHeader, rules: AgeRules) -> None:
        """Ages and versions of a recorded plan's tokens that are not masked."""
        for number, sample in enumerate(header.samples):
            self._count_versions(sample)
            for years, start, _, tokens in self._clock.spans(sample):
                if not any(mask.sample == number and mask.start <= start < mask.end for mask in planned.masks):
                    self._count(years, tokens, rules)

    def _count(self, years: int, tokens: int, rules: AgeRules) -> None:
        if tokens:
            self.ages[years] = self.ages.get(years, 0) + tokens
            self.over_age += tokens if rules.is_over(years) else 0

    def _count_versions(self, sample: SampleHeader) -> None:
        self.multi_version_samples += len({span.version for span in sample.spans}) > 1


def is_withdrawn(header: ExecutionHeader, withdrawals: tuple[Fork, ...]) -> bool:
    """Whether any of its tokens was made by a version that was withdrawn."""
    versions = {span.version for sample in header.samples for span in sample.spans} if withdrawals else ()
    return any(_is_after(version, withdrawals) for version in versions)


@functools.lru_cache(maxsize=4096)
def _is_after(label: str, withdrawals: tuple[Fork, ...]) -> bool:
    return version_withdrawn(Version.parse(label), withdrawals)


@functools.lru_cache(maxsize=4096)
def _years(label: str, at_number: int, forks: tuple[Fork, ...]) -> int:
    """A step's tokens have few versions: each is parsed once."""
    return age(Version.parse(label), at_number, forks)
