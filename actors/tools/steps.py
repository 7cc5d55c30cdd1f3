"""`ledger --step N`: which executions made a step, how old their tokens were, what was masked, what came out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from physarum.actors.own_samples import OwnSamples
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.book import Book, Bound
from physarum.actors.tools.errors import NotInRunError
from physarum.actors.tools.recorded import Recorded
from physarum.bus import ledger
from physarum.bus.ledger import Dropped, Mask, Planned
from physarum.bus.records import ExecutionHeader


class ExecutionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a step. `execution`, `reward`, `versions`, `ages` are null once its sample is gone from the log."""

    task: str
    sequence: int
    group: str
    attempt: int
    advantage: float
    trained_tokens: int
    masked_tokens: int
    masks: list[Mask]
    execution: str | None = None
    reward: float | None = None
    versions: dict[str, int] | None = None
    """Tokens that may carry gradient, by the version that made them."""
    ages: dict[int, int] | None = None
    """Tokens with gradient, by age."""


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `void`: a takeover resumed before it, its plan was executed again. `provisional`: no checkpoint has it."""

    number: int
    epoch: int
    plan: int
    at_number: int
    changed: bool
    void: bool
    provisional: bool
    refused: str
    started_at: float
    finished_at: float
    wait_s: float
    reward_mean: float | None
    tokens_trained: int
    tokens_masked: int
    ages: dict[int, int]
    multi_version_samples: int
    metrics: dict[str, float]
    executions: list[ExecutionRow]
    dropped: list[Dropped]
    trimmed: int
    """Executions whose sample is neither in the log nor archived any more."""


async def steps_at(run: OpenRun, number: int) -> list[StepView]:
    """The steps after which the weights had `number`: the one that changed them, those that changed nothing, void ones.

    Raises NotInRunError.
    """
    book = Book(await ledger.read(run.bus, key=run.ledger))
    found = [bound for bound in book.steps if bound.step.number == number]
    if not found:
        numbers = [step.number for step, _ in book.settled]
        there = f"steps {min(numbers)} to {max(numbers)}" if numbers else "no step yet"
        raise NotInRunError(f"run {run.name} has no step {number}; it has {there}")
    recorded = await Recorded.open(run.bus, run.folder)
    stored = await recorded.headers(one.sequence for bound in found for one in bound.plan.executions)
    own = OwnSamples.of(run.config)
    headers = {sequence: own.header(header) for sequence, header in stored.items()}
    return [step_view(book, bound, headers) for bound in found]


def step_view(book: Book, bound: Bound, headers: Mapping[int, ExecutionHeader]) -> StepView:
    """Pure: one step with what the headers still say of its executions."""
    step, plan = bound.step, bound.plan
    return StepView(
        number=step.number,
        epoch=step.epoch,
        plan=step.plan,
        at_number=plan.at_number,
        changed=step.changed,
        void=bound.void,
        provisional=book.provisional(step),
        refused=step.refused,
        started_at=step.started_at,
        finished_at=step.finished_at,
        wait_s=step.wait_s,
        reward_mean=step.reward_mean,
        tokens_trained=step.tokens_trained,
        tokens_masked=step.tokens_masked,
        ages=step.ages,
        multi_version_samples=step.multi_version_samples,
        metrics=step.metrics,
        executions=[_row(book, one, plan.at_number, headers.get(one.sequence)) for one in plan.executions],
        dropped=plan.dropped,
        trimmed=sum(one.sequence not in headers for one in plan.executions),
    )


def _row(book: Book, planned: Planned, at_number: int, header: ExecutionHeader | None) -> ExecutionRow:
    bare = ExecutionRow(
        task=planned.task,
        sequence=planned.sequence,
        group=planned.group,
        attempt=planned.attempt,
        advantage=planned.advantage,
        trained_tokens=planned.trained_tokens,
        masked_tokens=planned.masked_tokens,
        masks=planned.masks,
    )
    # A run that was forked has its parent's plans, but not the samples that they consumed.
    if header is None or header.task != planned.task:
        return bare
    ages: dict[int, int] = {}
    for label, tokens in trained_by_version(header, planned.masks).items():
        age = book.age(label, at_number)
        ages[age] = ages.get(age, 0) + tokens
    return msgspec.structs.replace(
        bare,
        execution=header.execution,
        reward=mean_reward(header),
        versions=tokens_by_version(header),
        ages=ages,
    )


def tokens_by_version(header: ExecutionHeader) -> dict[str, int]:
    """Tokens that may carry gradient, by the version that made them."""
    return trained_by_version(header, ())


def trained_by_version(header: ExecutionHeader, masks: Iterable[Mask]) -> dict[str, int]:
    """Tokens with gradient by version: masks cover whole spans, so a span is trained or not."""
    gone = {(mask.sample, mask.start) for mask in masks}
    found: dict[str, int] = {}
    for number, sample in enumerate(header.samples):
        for span, tokens in zip(sample.spans, sample.span_trainable, strict=True):
            if tokens and (number, span.start) not in gone:
                found[span.version] = found.get(span.version, 0) + tokens
    return found


def mean_reward(header: ExecutionHeader) -> float | None:
    """The mean over the execution's samples that have one."""
    rewards = [sample.reward for sample in header.samples if sample.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
