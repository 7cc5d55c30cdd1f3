"""A plan, what it is made by (rules), and the counts that are known with it. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from physarum.actors.trainer.aging import AgeRules, Clock, Tally
from physarum.actors.trainer.algorithm_settings import Shaping
from physarum.actors.trainer.groups import Arrived, GroupRules
from physarum.bus.ledger import PlanRecord
from physarum.bus.records import ExecutionHeader
from physarum.bus.version import Fork
from physarum.configs.age import Consumption


class PlanRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes and how old a token with gradient may be (`bound` None: any age).

    `ordered`: the groups of a batch stand in the source's order, not in that of their completion. `streams`: sources whose
    age rules are their own."""

    groups_per_batch: int
    bound: int | None
    normalize_std: bool
    objective: str
    advantage: str = "grpo"
    shaping: Shaping = Shaping()
    max_sequence_tokens: int
    groups: GroupRules = GroupRules()
    ordered: bool = False
    consumption: Consumption = "mask"
    aborts: bool = False
    streams: dict[str, AgeRules] = {}

    def age(self, source: str) -> AgeRules:
        """The age rules of a source's executions."""
        own = self.streams.get(source)
        return own if own is not None else AgeRules(bound=self.bound, consumption=self.consumption, aborts=self.aborts)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what it costs to know of it besides the record: ages by token, versions and rewards."""

    record: PlanRecord
    forks: tuple[Fork, ...]
    """The takeovers that were known when it was recorded: ages are counted over these, also when it is replayed."""
    ages: dict[int, int]
    over_age: int = 0
    """Tokens with gradient over the bound of their stream: 0 unless it trains them."""
    multi_version_samples: int
    reward_mean: float | None

    @classmethod
    def recorded(
        cls,
        record: PlanRecord,
        headers: list[ExecutionHeader],
        forks: tuple[Fork, ...],
        rules: PlanRules | None = None,
    ) -> Plan:
        """A plan that was recorded earlier, with its counts computed anew; its masks and advantages are not touched.

        Of `forks` those count that its own epoch knew."""
        forks = tuple(fork for fork in forks if fork.epoch <= record.epoch)
        tally = Tally(Clock(record.at_number, forks))
        for planned, header in zip(record.executions, headers, strict=True):
            tally.count(planned, header, rules.age(header.source) if rules is not None else AgeRules(bound=None))
        arrived = [Arrived(item.sequence, header) for item, header in zip(record.executions, headers, strict=True)]
        return cls.of(record, forks, tally, arrived)

    @classmethod
    def of(cls, record: PlanRecord, forks: tuple[Fork, ...], tally: Tally, arrived: list[Arrived]) -> Plan:
        return cls(
            record=record,
            forks=forks,
            ages=tally.ages,
            over_age=tally.over_age,
            multi_version_samples=tally.multi_version_samples,
            reward_mean=mean_reward(arrived),
        )

    @property
    def trained(self) -> int:
        return sum(1 for item in self.record.executions if item.trained_tokens > 0)

    @property
    def masked(self) -> int:
        return len(self.record.executions) - self.trained


def mean_reward(arrived: list[Arrived]) -> float | None:
    scored = [reward for item in arrived if (reward := item.header.reward) is not None]
    return float(np.mean(scored)) if scored else None
