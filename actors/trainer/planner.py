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

from physarum.actors.trainer.aging import Clock, Tally
from physarum.actors.trainer.filtering import Filters
from physarum.actors.trainer.groups import Arrived, DeadMember, Group, Groups
from physarum.actors.trainer.plan import Plan, PlanRules
from physarum.actors.trainer.planned_advantages import planned_advantages, shaped
from physarum.actors.trainer.selection import Selection
from physarum.actors.trainer.turns import Turns
from physarum.bus.intervals import IntervalSet
from physarum.bus.ledger import Dropped, GroupClosedRecord, PlanRecord, RefillRecord, lineage
from physarum.bus.records import ExecutionHeader
from physarum.bus.version import Fork
from physarum.configs.filters import FiltersConfig


class Planner:
    """Forms plans from groups. `disposed` holds the ordinals, per lineage, that left in earlier plans."""

    def __init__(
        self, rules: PlanRules, disposed: dict[str, IntervalSet] | None = None, filters: Filters | None = None
    ) -> None:
        self._rules = rules
        self._disposed = disposed if disposed is not None else {}
        self._dropped: list[Dropped] = []
        self._refills: list[RefillRecord] = []
        self._held: list[Dropped] = []
        self._turns = Turns(lambda source: rules.age(source).consumption == "wait", self._disposed)
        self._young: tuple[Clock, set[str]] = (Clock(0, ()), set())
        self._drops_by_age = any(one.consumption == "drop" for one in (rules.age(""), *rules.streams.values()))
        self._waits = any(one.consumption == "wait" for one in (rules.age(""), *rules.streams.values()))
        self.groups = Groups(rules.groups)
        self.selection = Selection()
        self.filters = filters if filters is not None else Filters(FiltersConfig())
        self._accepted: set[str] = set()
        self._rejected_groups = 0

    @property
    def ready(self) -> bool:
        """Whether a plan can be taken now. Where executions are dropped by age, `settle` comes first."""
        if self.groups.complete < self._rules.groups_per_batch:
            return False
        return not self._waits or len(self._turns.in_turn(self.groups.completed())) >= self._rules.groups_per_batch

    @property
    def has_rest(self) -> bool:
        """Whether a last, smaller plan can be taken: complete groups, or drops that no plan has recorded yet."""
        return self.groups.complete > 0 or any(gone.reason != "duplicate" for gone in self._dropped)

    @property
    def has_drops(self) -> bool:
        """Whether drops wait for a plan to record them; until then the log keeps their samples."""
        return bool(self._dropped)

    @property
    def drops_are_due(self) -> bool:
        """Whether filters rejected as many groups as a batch has since the last plan: the source waits for their room."""
        return self._rejected_groups >= self._rules.groups_per_batch

    @property
    def asks(self) -> bool:
        """Whether something is to be asked for again that `settle` has not returned yet."""
        return bool(self._refills)

    def admit(self, arrived: Arrived, now: float = 0.0) -> None:
        """Takes one execution (`now`: monotonic seconds). The first one of a task counts; others are dropped by name."""
        header = arrived.header
        refused = self._left_before(header)
        if refused is None and self._cut_off(arrived, now):
            return
        refused = refused or self._unwanted(header, now) or self.groups.admit(arrived, now)
        if refused != "duplicate":
            self.selection.generated(header.trainable)
        if refused is not None:
            self._drop(arrived, refused)

    def bury(self, dead: DeadMember, now: float = 0.0) -> RefillRecord | None:
        """A member was dead-lettered; returns the refill to record, if one is due."""
        if self._any_attempt_left(dead):
            return None
        refill = self.groups.bury(dead, now)
        if refill is None:
            self._skip(dead)
        return refill

    def revive(self, dead: DeadMember, now: float = 0.0) -> None:
        """A dead member was sent on its way again (`actorctl dead retry`)."""
        if not self._any_attempt_left(dead):
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
        self._judge()
        refills, self._refills = self._refills, []
        self._dropped += self._held
        self._held = []
        return refills

    def apply(self, record: GroupClosedRecord | RefillRecord) -> None:
        """Applies what was recorded in LEDGER."""
        if isinstance(record, RefillRecord):
            self.groups.asked(record)
            return
        for arrived in self.groups.close(record):
            self._drop(arrived, "incomplete")

    def take(self, epoch: int, at_number: int, forks: tuple[Fork, ...], *, only_drops: bool = False) -> Plan:
        """The next plan, its masks final for a step that leaves `at_number`. Not `ready`: a last or smaller one.

        `only_drops`: it records what was dropped and trains nothing."""
        self._judge()
        self._rejected_groups = 0
        clock = Clock(at_number, forks)
        groups = [] if only_drops else [self.groups.take(group.name) for group in self._next_groups()]
        if self._rules.ordered:
            groups.sort(key=lambda group: group.first_ordinal)
        arrived = [one for group in groups for one in group.arrived if not self._dropped_by_age(one, clock)]
        advantages = self._advantages(arrived)
        tally = Tally(clock)
        planned = [
            tally.plan(item, advantage, self._rules.age(item.header.source))
            for item, advantage in zip(arrived, advantages, strict=True)
        ]
        for item, one in zip(arrived, planned, strict=True):
            self.selection.trained(item.header.trainable, one.trained_tokens)
        dropped, self._dropped = self._dropped, []
        record = PlanRecord(epoch=epoch, at_number=at_number, executions=planned, dropped=dropped)
        for gone in record.places:
            self._disposed.setdefault(gone.lineage, IntervalSet()).add(gone.ordinal)
        return Plan.of(record, tally, arrived)

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

    def _expel_old(self, group: Group, clock: Clock, now: float) -> None:
        for arrived in group.arrived:
            rules = self._rules.age(arrived.header.source)
            if rules.consumption == "drop" and clock.holds_over(arrived.header, rules):
                self._expel(arrived, "over_age", now)

    def _expel(self, arrived: Arrived, reason: str, now: float) -> None:
        """No plan may record the drop before its refill is recorded: after a crash nobody would ask for it again."""
        refill = self.groups.expel(arrived, reason, now)
        if refill is None:
            self._drop(arrived, reason)
            self._skip(arrived.header)
            return
        self.groups.asked(refill)
        self._refills.append(refill)
        self._held.append(_dropped(arrived, reason))

    def _dropped_by_age(self, arrived: Arrived, clock: Clock) -> bool:
        """What became too old after the last `settle` (a last batch): dropped, and its group goes on without it."""
        rules = self._rules.age(arrived.header.source)
        old = rules.consumption == "drop" and clock.holds_over(arrived.header, rules)
        if old:
            self._drop(arrived, "over_age")
        return old

    def _cut_off(self, arrived: Arrived, now: float) -> bool:
        """Takes what a rollout worker gave up as hopeless: its group waits for the refill, or goes on without it."""
        header = arrived.header
        if not self._rules.age(header.source).cut_off(header):
            return False
        refused = self.groups.refusal(header)
        if refused is not None:
            self._drop(arrived, refused)
        else:
            self._expel(arrived, "hopeless", now)
        return True

    def _left_before(self, header: ExecutionHeader) -> str | None:
        if header.ordinal in self._disposed.get(lineage(header.source, header.attempt), ()):
            return "duplicate"
        successor = self.groups.successor(header.group, header.member)
        if successor is not None and header.attempt < successor.attempt:
            return successor.reason
        return "late" if self._any_attempt_left(header) else None

    def _any_attempt_left(self, one: ExecutionHeader | DeadMember) -> bool:
        """Whether the member left in a plan, by whichever attempt; those that were too old do not count."""
        successor = self.groups.successor(one.group, one.member)
        first = successor.attempt if successor is not None else 0
        attempts = range(first, max(one.attempt, self._rules.groups.refills) + 1)
        return any(one.ordinal in self._disposed.get(lineage(one.source, attempt), ()) for attempt in attempts)

    def _unwanted(self, header: ExecutionHeader, now: float) -> str | None:
        """A sequence above the token budget cannot be trained at all, and a filter may refuse an execution; its group goes on
        without it."""
        fits = all(sample.tokens <= self._rules.max_sequence_tokens for sample in header.samples)
        if fits and self.filters.execution(header):
            return None
        self.groups.give_up(header.group, header.group_size, header.member, now)
        self._skip(header)
        return "filtered" if fits else "too_long"

    def _judge(self) -> None:
        """Each complete group is put to the filters once; one that is rejected is dropped whole."""
        if not self.filters.of_groups:
            return
        for group in self.groups.completed():
            if group.name in self._accepted:
                continue
            if self.filters.group([one.header for one in group.arrived]):
                self._accepted.add(group.name)
                continue
            self._rejected_groups += 1
            for one in self.groups.take(group.name).arrived:
                self._drop(one, "filtered")
        self._accepted &= {group.name for group in self.groups.completed()}

    def _advantages(self, arrived: list[Arrived]) -> list[float | None]:
        rules = self._rules
        lengths = [sum(sample.response for sample in item.header.samples) for item in arrived]
        rewards = shaped(rules.shaping, [item.header.reward or 0.0 for item in arrived], lengths)
        groups = [item.header.group for item in arrived]
        return planned_advantages(rules.objective, rules.advantage, rewards, groups, rules.normalize_std)

    def _drop(self, arrived: Arrived, reason: str) -> None:
        header = arrived.header
        self._dropped.append(_dropped(arrived, reason))
        if reason in ("incomplete", "filtered"):
            self._skip(header)


def _dropped(arrived: Arrived, reason: str) -> Dropped:
    header = arrived.header
    place = (arrived.sequence, header.task, header.source, header.ordinal, header.attempt)
    return Dropped(*place, reason, header.reward)
