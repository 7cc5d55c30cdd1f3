"""What a run of B1 or B2 shows, in model seconds and model tokens, from its ledger and from what the engines know they made.

Ages are not taken from the trainer's word: each token with gradient is looked up in what the model made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from physarum.actors.account import Account, Settled
from physarum.bus.ledger import Planned
from tests.bench import age_hooks
from tests.bench.age_hooks import UNIT
from tests.bench.latency import Model

_TAIL = 0.99


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Means over the steps after warm-up. `limit_s`: of the tokens trained; `window_limit_s`: max(train, generate + pause) of
    what was trained and what was generated in these steps; `bus_share`: of the trainer's time neither trained nor waited for
    samples.
    """

    steps: int
    step_s: float
    limit_s: float
    window_limit_s: float
    trained_tokens_per_s: float
    trainer_idle: float
    bus_share: float
    slot_idle: float
    max_trained_age: int
    over_age_tokens_trained: int
    tokens_masked_share: float
    executions_lost: int
    executions_per_s: float
    dropped: dict[str, int]
    length_ratio: float
    tail_share_samples: float
    tail_share_tokens: float


def measured(model: Model, warm: int, k: int, done: Sequence[Settled], closed: Account, speedup: float) -> Measured:
    """From step `warm` to the last. Everything is compared with all lengths that the model can make."""
    steps = done[warm:]
    before = done[warm - 1].step
    seconds = (steps[-1].step.finished_at - before.finished_at) * speedup
    planned = [(one.plan.at_number, item) for one in steps for item in one.plan.executions]
    ages = [_ages(at_number, item) for at_number, item in planned]
    trained = np.array([sum(tokens for _, tokens in made) for made in ages], dtype=np.float64) * UNIT
    masked = UNIT * sum(item.masked_tokens for _, item in planned)
    lengths = np.array([sum(tokens for _, tokens in age_hooks.World.made[item.task]) for _, item in planned])
    waited = sum(one.step.wait_s for one in steps) * speedup
    worked = sum(one.step.metrics["model_train_s"] for one in steps)
    tokens = [one.step.metrics["model_tokens"] for one in steps]
    data = _data_lengths(model)
    busy_slots, made = _generated(before.number, steps[-1].step.number)
    return Measured(
        steps=len(steps),
        step_s=seconds / len(steps),
        limit_s=model.limit_s(float(np.mean(tokens))),
        window_limit_s=max(
            model.train_s(float(np.mean(tokens))), model.generation_s(made / len(steps)) + model.pause_s
        ),
        trained_tokens_per_s=float(trained.sum()) / seconds,
        trainer_idle=waited / seconds,
        bus_share=1 - (waited + worked) / seconds,
        slot_idle=1 - busy_slots / (model.fleet * model.slots),
        max_trained_age=max(age for made in ages for age, _ in made),
        over_age_tokens_trained=UNIT * sum(tokens for made in ages for age, tokens in made if age > k),
        tokens_masked_share=masked / (masked + float(trained.sum())),
        executions_lost=abs(closed.imbalance) + closed.double_trained + closed.dead + closed.dropped,
        executions_per_s=len(planned) / seconds * speedup,
        dropped=closed.dropped_by_reason,
        length_ratio=float(trained[trained > 0].mean() / data.mean()),
        **_tail(data, lengths, trained),
    )


def _ages(at_number: int, item: Planned) -> list[tuple[int, int]]:
    """(Age, recorded tokens) of what is not masked, from what the engines made."""
    gone = {(mask.start, mask.end) for mask in item.masks}
    return [(at_number - number, end - start) for number, start, end in _parts(item.task) if (start, end) not in gone]


def _parts(task: str) -> Iterator[tuple[int, int, int]]:
    start = 0
    for number, units in age_hooks.recorded(age_hooks.World.made[task]):
        yield number, start, start + units
        start += units


def _generated(first: int, last: int) -> tuple[float, float]:
    """(Slots taken on the average, tokens made) between the updates to two numbers."""
    (began, busy, made), (ended, all_busy, all_made) = (age_hooks.World.made_by[number] for number in (first, last))
    return (all_busy - busy) / (ended - began), all_made - made


def _data_lengths(model: Model) -> np.ndarray:
    """Equally likely lengths of the whole distribution."""
    return np.array([model.quantile((point + 0.5) / 20_000) for point in range(20_000)], dtype=np.float64)


def _tail(data: np.ndarray, lengths: np.ndarray, trained: np.ndarray) -> dict[str, float]:
    """The longest 1 %: their share of what was trained over their share of the data."""
    limit = np.quantile(data, _TAIL)
    long, used = lengths >= limit, trained > 0
    return {
        "tail_share_samples": float((long & used).sum() / used.sum() / (data >= limit).mean()),
        "tail_share_tokens": float(trained[long].sum() / trained.sum() / (data[data >= limit].sum() / data.sum())),
    }
