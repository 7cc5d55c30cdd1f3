"""Which executions make the next step: decided from headers alone, in the order in which groups became complete.

Pure and deterministic: the same headers and deaths in the same order give the same plans. Every execution that enters
leaves in exactly one plan, as trained, masked or dropped with a reason. No token over its stream's bound keeps its
gradient, whatever the stream's policy (`train` excepted): where nothing else keeps it, take() masks or drops.

    headers, in log order --> groups --complete, or closed by death or deadline--> take() --> PlanRecord
    dead letters -----------^   ^  |
                                |  +--settle(): over age (consumption `drop`)--> dropped, and asked for again
                                +--------------------------- refill --------------------------------+
"""

from __future__ import annotations

from physarum.actors.trainer.aging import Clock, Tally, is_withdrawn
from physarum.actors.trainer.drops import Drops
from physarum.actors.trainer.filtering import Filters
from physarum.actors.trainer.groups import Arrived, DeadMember, Group, Groups
from physarum.actors.trainer.plan import Plan, PlanRules
from physarum.actors.trainer.planned_advantages import planned_advantages, preferences, shaped
from physarum.actors.trainer.selection import Selection
from physarum.actors.trainer.turns import Turns
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import GroupClosedRecord, Planned, PlanRecord, RefillRecord, lineage
from physarum.bus.records import ExecutionHeader
from physarum.bus.version import Fork
from physarum.configs.filters import FiltersConfig


class Planner:
    """Forms plans from groups. `disposed` holds the ordinals, per lineage, that left in earlier plans."""

    def __init__(
        self,
        rules: PlanRules,
        disposed: dict[str, IntervalSet] | None = None,
        filters: Filters | None = None,
        withdrawals: tuple[Fork, ...] = (),
    ) -> None:
        """`withdrawals`: versions after a number, of an epoch and all before it, whose executions are dropped."""
        self._withdrawals = withdrawals
        self._rules = rules
        self._disposed = disposed if disposed is not None else {}
        self._turns = Turns(lambda source: rules.age(source).consumption == "wait", self._disposed)
        self._young: tuple[Clock, set[str]] = (Clock(0, ()), set())
        self._drops_by_age = any(one.consumption == "drop" for one in (rules.age(""), *rules.streams.values()))
        self._waits = any(one.consumption == "wait" for one in (rules.age(""), *rules.streams.values()))
        self.groups = Groups(rules.groups)
        self._drops = Drops(self.groups.awaits)
        self.selection = Selection()
        self.filters = filters if filters is not None else Filters(FiltersConfig())
        self._accepted: set[str] = set()

    @property
    def ready(self) -> bool:
        """Whether a plan can be taken now. Where executions are dropped by age, `settle` comes first."""
        if self.groups.complete < self._rules.groups_per_batch:
            return False
        return not self._waits or len(self._turns.in_turn(self.groups.completed())) >= self._rules.groups_per_batch

    @property
    def has_rest(self) -> bool:
        """Whether a last, smaller plan can be taken: complete groups, or drops that no plan has recorded yet."""
        return self.groups.complete > 0 or self._drops.worth_a_plan

    @property
    def has_drops(self) -> bool:
        """Whether drops wait for a plan to record them; until then the log keeps their samples."""
        return self._drops.any

    @property
    def drops_are_due(self) -> bool:
        """Whether groups that vanished whole stand in the place of a batch: the source may be waiting for their room."""
        vanished = self._drops.vanished
        return vanished > 0 and vanished + self.groups.complete >= self._rules.groups_per_batch

    @property
    def drops_due_at(self) -> float | None:
        """When drops are to be recorded although no batch is ready, in monotonic seconds; None where none may be."""
        return self._drops.due_at

    @property
    def asks(self) -> bool:
        """Whether something is to be asked for again that `settle` has not returned yet."""
        return self._drops.asks

    def admit(self, arrived: Arrived, now: float = 0.0) -> None:
        """Takes one execution (`now`: monotonic seconds). The first one of a task counts; others are dropped by name."""
        header = arrived.header
        refused = self._left_before(header)
        if refused is None and self._cut_off(arrived, now):
            return
        refused = refused or self.groups.refusal(header)
        unwanted = self._unwanted(header) if refused is None else None
        if refused != "duplicate" and header.samples:
            self.selection.generated(header.trainable)
        if refused is None and unwanted != "uncompared":
            self.groups.answered(header, now)
        if unwanted is not None:
            self.groups.give_up(header.group, header.group_size, header.member, now)
            self._drops.add(arrived, unwanted, now)
            self._lost(header)
        elif refused is not None:
            self._drops.add(arrived, refused, now)
            if refused in ("late", "incomplete"):
                self._skip(header)
        else:
            self.groups.admit(arrived, now)

    def bury(self, dead: DeadMember, now: float = 0.0) -> RefillRecord | None:
        """A member was dead-lettered; returns the refill to record, if one is due."""
        if self._group_left(dead):
            self._skip(dead)
            return None
        refill = self.groups.bury(dead, now)
        if refill is None:
            self._lost(dead)
        return refill

    def revive(self, dead: DeadMember, now: float = 0.0) -> None:
        """A dead member was sent on its way again (`actorctl dead retry`)."""
        if not self._group_left(dead):
            self.groups.revive(dead, now)

    def settle(self, at_number: int, forks: tuple[Fork, ...], now: float = 0.0) -> list[RefillRecord]:
        """What has become too old for a step that leaves `at_number` goes, where the stream says `drop`, and groups that a
        filter rejects; returns what to record and ask for instead, also of what came cut off. Call it before `ready`.

        Raises UnrecoverableError when a filter rejects too many groups in a row."""
        if self._drops_by_age:
            clock = Clock(at_number, forks)
            young = self._young[1] if self._young[0] == clock else set()
            for group in self.groups.completed():
                if group.name not in young:
                    self._expel_old(group, clock, now)
            self._young = clock, {group.name for group in self.groups.completed()}
        self._judge(now)
        return self._drops.to_ask()

    def apply(self, record: GroupClosedRecord | RefillRecord, now: float = 0.0) -> None:
        """Applies what was recorded in LEDGER."""
        if isinstance(record, RefillRecord):
            self.groups.asked(record)
            return
        self._turns.pass_over(record.source, record.gone_ordinals())
        dropped = self.groups.close(record)
        for arrived in dropped:
            self._drops.add(arrived, "incomplete", now)
        if dropped:
            self._vanished(dropped[0].header)

    def take(
        self, epoch: int, at_number: int, forks: tuple[Fork, ...], *, only_drops: bool = False, now: float = 0.0
    ) -> Plan:
        """The next plan, its masks final for a step that leaves `at_number`. Not `ready`: a last or smaller one.

        `only_drops`: it records what was dropped and trains nothing."""
        self._judge(now)
        clock = Clock(at_number, forks)
        groups = [] if only_drops else [self.groups.take(group.name) for group in self._next_groups()]
        for group in groups:
            self._turns.skip(group.source, group.first_ordinal, group.size)
        if self._rules.ordered:
            groups.sort(key=lambda group: group.first_ordinal)
        arrived = [one for group in groups for one in group.arrived if not self._dropped_by_age(one, clock, now)]
        tally = Tally(clock)
        planned = self._planned(arrived, clock, tally)
        for item, one in zip(arrived, planned, strict=True):
            self.selection.trained(item.header.trainable, one.trained_tokens)
        dropped = self._drops.leave(alone=not planned)
        record = PlanRecord(epoch=epoch, at_number=at_number, executions=planned, dropped=dropped)
        for gone in record.places:
            self._disposed.setdefault(gone.lineage, IntervalSet()).add(gone.ordinal)
        return Plan.of(record, forks, tally, arrived)

    def upcoming(self) -> list[int]:
        """The sequences that a plan taken now would hold, as many as there are."""
        return [one.sequence for group in self._next_groups() for one in group.arrived]

    def _next_groups(self) -> list[Group]:
        """The groups of the next plan, where they stand."""
        count, complete = self._rules.groups_per_batch, self.groups.completed()
        if not self._waits:
            return complete[:count]
        turn = self._turns.in_turn(complete)
        if len(turn) < count:  # nothing more will come, or the log is full
            turn = self._turns.all_in_order(complete)
        return turn[:count]

    def _skip(self, one: ExecutionHeader | DeadMember) -> None:
        """A group that is known no longer, without having been taken, brings nothing."""
        if not self.groups.awaits(one.group):
            self._turns.skip(one.source, one.ordinal - one.member, one.group_size)

    def _lost(self, one: ExecutionHeader | DeadMember) -> None:
        """A member will not come, and its group may have vanished with it."""
        if self.groups.is_over(one.group):
            self._vanished(one)

    def _vanished(self, one: ExecutionHeader | DeadMember) -> None:
        """The group of `one` left whole. Where its executions were filtered, groups that were complete before it are judged
        first: the filters count what they reject in a row."""
        self._skip(one)
        if self._drops.holds(one.group, "filtered"):
            self._judge()
            self.filters.vanished()

    def _expel_old(self, group: Group, clock: Clock, now: float) -> None:
        for arrived in group.arrived:
            rules = self._rules.age(arrived.header.source)
            if rules.consumption == "drop" and clock.holds_over(arrived.header, rules):
                self._expel(arrived, "over_age", now)

    def _expel(self, arrived: Arrived, reason: str, now: float) -> None:
        refill = self.groups.expel(arrived, reason, now)
        if refill is None:
            self._drops.add(arrived, reason, now)
            self._lost(arrived.header)
            return
        self.groups.asked(refill)
        self._drops.replace(arrived, reason, refill, now)

    def _dropped_by_age(self, arrived: Arrived, clock: Clock, now: float) -> bool:
        """What became too old after the last `settle` (a last batch): dropped, and its group goes on without it."""
        rules = self._rules.age(arrived.header.source)
        old = rules.consumption == "drop" and clock.holds_over(arrived.header, rules)
        if old:
            self._drops.add(arrived, "over_age", now)
        return old

    def _cut_off(self, arrived: Arrived, now: float) -> bool:
        """Takes what a rollout worker gave up as hopeless: its group waits for the refill, or goes on without it."""
        header = arrived.header
        if not self._rules.age(header.source).cut_off(header):
            return False
        refused = self.groups.refusal(header)
        if refused is not None:
            self._drops.add(arrived, refused, now)
        else:
            self._expel(arrived, "hopeless", now)
        return True

    def _left_before(self, header: ExecutionHeader) -> str | None:
        if header.ordinal in self._disposed.get(lineage(header.source, header.attempt), ()):
            return "duplicate"
        successor = self.groups.successor(header.group, header.member)
        if successor is not None and header.attempt < successor.attempt:
            return successor.reason
        if self.groups.awaits(header.group):
            return "late" if self._attempt_left(header, header.ordinal, header.member) else None
        return "late" if self._group_left(header) else None

    def _attempt_left(self, one: ExecutionHeader | DeadMember, ordinal: int, member: int) -> bool:
        """Whether a member of the group of `one` left in a plan, by whichever attempt; those that were asked for again
        do not count."""
        successor = self.groups.successor(one.group, member)
        first = successor.attempt if successor is not None else 0
        attempts = range(first, max(one.attempt, self._rules.groups.refills) + 1)
        return any(ordinal in self._disposed.get(lineage(one.source, attempt), ()) for attempt in attempts)

    def _group_left(self, one: ExecutionHeader | DeadMember) -> bool:
        """Whether a plan took the group: before that, no plan holds anything of it but what was asked for again (drops.py)."""
        start = one.ordinal - one.member
        return any(self._attempt_left(one, start + member, member) for member in range(one.group_size))

    def _unwanted(self, header: ExecutionHeader) -> str | None:
        """An execution may have come when the others' rewards were given, or hold nothing of this policy, a sequence above the
        token budget cannot be trained at all, and a filter may refuse one; its group goes on without it."""
        if self.groups.is_apart(header):
            return "uncompared"
        if not header.samples:
            return "absent"
        if any(sample.tokens > self._rules.max_sequence_tokens for sample in header.samples):
            return "too_long"
        if is_withdrawn(header, self._withdrawals):
            return "withdrawn"
        if self.filters.keeps_next:
            self._judge()  # it may be here already
        return None if self.filters.execution(header) else "filtered"

    def _judge(self, now: float = 0.0) -> None:
        """Each complete group is put to the filters once; one that is rejected is dropped whole."""
        if not self.filters.any:
            return
        for group in self.groups.completed():
            if group.name in self._accepted:
                continue
            if self.filters.group([one.header for one in group.arrived]):
                self._accepted.add(group.name)
                continue
            for one in self.groups.take(group.name).arrived:
                self._drops.add(one, "filtered", now)
            self._turns.skip(group.source, group.first_ordinal, group.size)
        self._accepted &= {group.name for group in self.groups.completed()}

    def _planned(self, arrived: list[Arrived], clock: Clock, tally: Tally) -> list[Planned]:
        rules = self._rules
        ages = [rules.age(item.header.source) for item in arrived]
        lengths = [sum(sample.response for sample in item.header.samples) for item in arrived]
        rewards = shaped(rules.shaping, [item.header.reward or 0.0 for item in arrived], lengths)
        groups = [item.header.group for item in arrived]
        only: list[int | None] = [None] * len(arrived)
        if rules.objective == "dpo":
            only = [clock.pairable(item.header, age) for item, age in zip(arrived, ages, strict=True)]
            tokens = [
                None if number is None else item.header.samples[number].tokens
                for item, number in zip(arrived, only, strict=True)
            ]
            advantages = preferences(rewards, groups, tokens, rules.max_sequence_tokens)
        else:
            advantages = planned_advantages(rules.objective, rules.advantage, rewards, groups, rules.normalize_std)
        return [tally.plan(*one) for one in zip(arrived, advantages, ages, only, strict=True)]
