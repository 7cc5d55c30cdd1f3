"""The summary of a finished run: what `summary.json` holds and the end of `actorctl up` shows.

A value that was not measured is null, never a guess. Reports (METRICS) may be lost, so whatever must be exact comes
from the ledger and the registers; only what has no other place (generation, swaps, publications) comes from reports.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from physarum.actors import policies, states
from physarum.actors.account import Account, accounts, read_ledger, settled
from physarum.actors.context import RunFolder
from physarum.actors.model_maker import StartModel, read_start_model
from physarum.bus import log, names
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.ledger import Numbered, RollbackRecord, StepRecord
from physarum.bus.metrics import Metric
from physarum.configs.root import RootConfig

T = TypeVar("T", bound=msgspec.Struct)
Interval = tuple[float, float]

_MERGE_AT = 4096
"""Intervals are merged when so many have come: memory stays proportional to the gaps between them."""


class Tally:
    """What only reports say. `add` every metric of the run once, but those of further policies' trainers."""

    def __init__(self) -> None:
        self.tokens_generated: int | None = None
        self.replay: dict[str, Counter[str]] = {}
        self.versions: set[str] = set()
        self.pauses_s: list[float] = []
        self.transports: Counter[str] = Counter()
        self.engine_start_s: float | None = None
        self.ready_at: dict[int, float] = {}
        self._generating: list[Interval] = []

    def add(self, metric: Metric) -> None:
        values = metric.values
        match metric.kind:
            case "generation":
                self.tokens_generated = (self.tokens_generated or 0) + int(values["tokens"])
                self._generating += [(float(start), float(end)) for start, end in values.get("intervals", ())]
                for kind, tokens in values.get("replay", {}).items():
                    self.replay.setdefault(kind, Counter()).update(tokens)
                if len(self._generating) > _MERGE_AT:
                    self._generating = union(self._generating)
            case "publish":
                self.versions.add(str(values["version"]))
            case "swap":
                self.pauses_s.append(float(values["pause_s"]))
                self.transports[str(values["transport"])] += 1
            case "trainer_ready":
                self.ready_at.setdefault(int(values["epoch"]), metric.at)
            case "engine_start":
                self.engine_start_s = max(self.engine_start_s or 0.0, float(values["seconds"]))

    @property
    def generating(self) -> list[Interval]:
        """When at least one engine was generating: disjoint intervals in Unix seconds, in order."""
        return union(self._generating)


class Facts(msgspec.Struct, kw_only=True):
    """Everything that a summary is made of."""

    steps: list[StepRecord]
    training_began_at: float | None
    eval_start: states.EvalScore | None
    eval_end: states.EvalScore | None
    done: states.TrainerDone | None
    start_model: StartModel | None
    age_bound: int


async def summarise(bus: Bus, config: RootConfig, folder: RunFolder, tally: Tally) -> dict[str, Any]:
    """Reads the run's ledger and registers (the bus must be up, the actors at rest) and builds the summary."""
    closed = await accounts(bus, config.policies)
    records = await read_ledger(bus)
    eval_start = await _register(bus, (states.EVAL_START,), states.EvalScore)
    facts = Facts(
        steps=[step for step, _ in settled(records)],
        training_began_at=await _began_at(bus, records, tally, eval_start),
        eval_start=eval_start,
        eval_end=await _register(bus, (states.EVAL_END,), states.EvalScore),
        done=await _register(bus, (states.TRAINER_DONE,), states.TrainerDone),
        start_model=read_start_model(folder),
        age_bound=config.age.bound,
    )
    result = build(facts, tally, closed.pop(""))
    further = {name: await _of_policy(bus, name, own, config.of_policy(name)) for name, own in closed.items()}
    return {**result, **({"policies": further} if further else {})}


async def _of_policy(bus: Bus, name: str, closed: Account, view: RootConfig) -> dict[str, Any]:
    """What a further policy has of its own."""
    steps = [step for step, _ in settled(await read_ledger(bus, name))]
    done = await _register(bus, policies.key(states.TRAINER_DONE, name), states.TrainerDone)
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    return {
        "steps": sum(step.changed for step in steps),
        "tokens_trained": closed.tokens.trained,
        "reward_mean_last": _rounded(rewards[-1]) if rewards else None,
        "age_bound": view.age.bound,
        "max_trained_age": _oldest(steps),
        "freshness": _freshness(steps),
        "model_dir": done.model if done else None,
        "account": closed.to_dict(),
    }


def build(facts: Facts, tally: Tally, closed: Account) -> dict[str, Any]:
    """The summary's fields, in the order in which they are shown."""
    steps = facts.steps
    seconds = _seconds(facts)
    return {
        "reward_start": facts.eval_start.score if facts.eval_start else None,
        "reward_end": facts.eval_end.score if facts.eval_end else None,
        "steps": sum(step.changed for step in steps),
        "versions": len(tally.versions) or None,
        "seconds": _rounded(seconds),
        "setup_seconds": _setup(facts.start_model, tally),
        "tokens_generated": tally.tokens_generated,
        "tokens_trained": closed.tokens.trained,
        "replay": {kind: dict(tokens) for kind, tokens in sorted(tally.replay.items())},
        "trainer_wait_share": _rounded(_waited_s(facts) / seconds) if seconds else None,
        "overlap_share": _rounded(overlap_share(steps, tally.generating)),
        "age_bound": facts.age_bound,
        "max_trained_age": _oldest(steps),
        "freshness": _freshness(steps),
        "multi_version_samples": sum(step.multi_version_samples for step in steps),
        "pause_p50_s": _rounded(percentile(tally.pauses_s, 0.50)),
        "pause_p99_s": _rounded(percentile(tally.pauses_s, 0.99)),
        "weight_updates": dict(tally.transports),
        "model_dir": facts.done.model if facts.done else None,
        "account": closed.to_dict(),
    }


def overlap_share(steps: Iterable[StepRecord], generating: Sequence[Interval]) -> float | None:
    """|union of the steps and union of the generation, intersected| / |union of the steps|; null without either."""
    training = union([(step.started_at, step.finished_at) for step in steps])
    total_s = sum(end - start for start, end in training)
    if not generating or total_s <= 0:
        return None
    return _common_s(training, generating) / total_s


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of moments as disjoint intervals in order; empty and inverted ones vanish."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between closest ranks (as numpy does); null without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _common_s(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Length of the intersection of two lists of disjoint intervals in order."""
    common_s, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        common_s += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common_s


def _seconds(facts: Facts) -> float | None:
    """From the start of training to the end of its last step, by the clock: a time in which the run was down counts."""
    if not facts.steps or facts.training_began_at is None:
        return None
    return max(step.finished_at for step in facts.steps) - facts.training_began_at


def _waited_s(facts: Facts) -> float:
    """Waiting for samples ends where a step starts; what was waited before training began (its evaluation) is not its."""
    began_at = facts.training_began_at or 0.0
    waits = [(max(began_at, step.started_at - step.wait_s), step.started_at) for step in facts.steps]
    return sum(end - start for start, end in union(waits))


def _freshness(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """What the age policy cost (actors/trainer/step_metrics.py): sums over all steps, and the last word on selection."""
    masked, trained = sum(step.tokens_masked for step in steps), sum(step.tokens_trained for step in steps)
    last: dict[str, float] = {}
    for step in steps:
        last |= step.metrics
    return {
        "masked_share": _rounded(masked / (masked + trained)) if masked + trained else None,
        "over_age_tokens": int(sum(step.metrics.get("over_age_tokens", 0) for step in steps)),
        "publish_debt_max": int(max((step.metrics.get("publish_debt", 0) for step in steps), default=0)),
        "length_ratio": _rounded(last.get("length_ratio")),
        "tail_share_samples": _rounded(last.get("tail_share_samples")),
        "tail_share_tokens": _rounded(last.get("tail_share_tokens")),
    }


def _oldest(steps: Sequence[StepRecord]) -> int | None:
    """The largest age of a token that was trained."""
    return max((age for step in steps for age, tokens in step.ages.items() if tokens), default=None)


def _setup(model: StartModel | None, tally: Tally) -> dict[str, Any]:
    """`sft` is what making the start model took when it was made; `sft_cached` says that it was made earlier."""
    by_run = model is not None and model.origin == "made_by"
    return {
        "sft": _rounded(model.seconds) if model is not None and by_run else None,
        "sft_cached": model.cached if model is not None and by_run else None,
        "engine_start": _rounded(tally.engine_start_s),
    }


async def _began_at(
    bus: Bus, records: Sequence[Numbered], tally: Tally, eval_start: states.EvalScore | None
) -> float | None:
    """When the first trainer was ready and (where asked for) the start model was evaluated, whichever came later.

    Without the trainer's own report the moment of its first ledger record (its takeover) stands for its readiness.
    """
    first = next((item for item in records if isinstance(item.record, RollbackRecord)), None)
    if first is None or not isinstance(first.record, RollbackRecord):
        return None
    ready_at = tally.ready_at.get(first.record.new_epoch)
    if ready_at is None:
        ready_at = _unix((await log.get(bus, "ledger", first.sequence)).headers["Nats-Time-Stamp"])
    return max(ready_at, eval_start.finished_at) if eval_start is not None else ready_at


async def _register(bus: Bus, key: tuple[str, ...], kind: type[T]) -> T | None:
    """The RUN register's value under `key`, read without a writer's means."""
    subject = names.subject(bus.run, "run", *key)
    reply = await bus.request(f"$JS.API.DIRECT.GET.{names.stream(bus.run, 'run')}.{subject}", b"")
    return decode(reply.data, kind) if reply.data else None


def _unix(text: str) -> float:
    """Unix seconds of the server's RFC 3339 time, whose nanoseconds Python does not read."""
    head, _, fraction = text.rstrip("Z").partition(".")
    whole = datetime.datetime.fromisoformat(head).replace(tzinfo=datetime.UTC).timestamp()
    return whole + (float(f"0.{fraction}") if fraction else 0.0)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
