"""What `actorctl ledger --step | --sample | --version` shows to people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from physarum.actors.tools.samples import Copy, SampleView, Use
from physarum.actors.tools.steps import ExecutionRow, StepView
from physarum.actors.tools.versions import VersionView


def step_text(steps: Iterable[StepView]) -> str:
    """Each step with one line for every execution."""
    return "\n".join(line for step in steps for line in _step(step))


def sample_text(view: SampleView) -> str:
    """Where it is, its copies and its plans."""
    reason = f" ({view.reason})" if view.reason else ""
    lines = [f"{view.task}: {view.state}{reason}, {view.where}"]
    lines += [_copy(copy) for copy in view.copies]
    lines += [_use(use) for use in view.uses]
    lines += [f"  DEAD #{row.id}: {row.state}, {row.reason}" for row in view.letters]
    return "\n".join(lines)


def version_text(view: VersionView) -> str:
    """Who made it, and what it took part in."""
    made = f"made by plan {view.made_by}" if view.made_by is not None else "the weights that an epoch began with"
    lines = [
        f"{view.version}: {made}{', withdrawn by a takeover' if view.withdrawn else ''}; age counts from {view.effective}"
    ]
    lines += [
        f"  step {step.number} (plan {step.plan}): {step.tokens} tokens of age {step.age}"
        + (f" in {step.executions} executions" if step.executions is not None else " (samples trimmed)")
        for step in view.steps
    ]
    lines += [
        f"  sample {sample.sequence} {sample.execution}: {sample.tokens} tokens,"
        f" {'not trained yet' if sample.step is None else f'step {sample.step}'}"
        for sample in view.samples
    ]
    if view.trimmed_through:
        lines.append(f"  samples up to {view.trimmed_through} are trimmed and not listed (samples.keep)")
    return "\n".join(lines)


def _step(step: StepView) -> Iterator[str]:
    marks = [name for name, is_so in (("void", step.void), ("provisional", step.provisional)) if is_so]
    marks += ["nothing changed"] if not step.changed else []
    reward = "-" if step.reward_mean is None else f"{step.reward_mean:.3f}"
    yield (
        f"step {step.number} (epoch {step.epoch}, plan {step.plan}{', ' + ', '.join(marks) if marks else ''}):"
        f" reward {reward}, {step.tokens_trained} tokens trained, {step.tokens_masked} masked,"
        f" ages {_counts(step.ages)}, {step.finished_at - step.started_at:.2f} s after {step.wait_s:.2f} s of waiting"
    )
    if step.refused:
        yield f"  refused: {step.refused}"
    if step.metrics:
        yield "  " + " ".join(f"{name}={value:.4g}" for name, value in sorted(step.metrics.items()))
    yield from (_execution(one) for one in step.executions)
    yield from (f"  {one.task} #{one.sequence}: dropped ({one.reason})" for one in step.dropped)
    if step.trimmed:
        yield f"  {step.trimmed} samples are trimmed: their versions, ages and rewards are not shown (samples.keep)"


def _execution(one: ExecutionRow) -> str:
    reward = "" if one.reward is None else f" reward {one.reward:.3f}"
    made = "" if one.versions is None else f" versions {_counts(one.versions)} ages {_counts(one.ages or {})}"
    return (
        f"  {one.task} #{one.sequence}:{reward} advantage {one.advantage:+.4f}"
        f" trained {one.trained_tokens} masked {one.masked_tokens}{made}"
    )


def _copy(copy: Copy) -> str:
    reward = "-" if copy.reward is None else f"{copy.reward:.3f}"
    return (
        f"  {copy.stream.upper()} #{copy.sequence} {copy.execution}: reward {reward}, versions {_counts(copy.versions)}"
    )


def _use(use: Use) -> str:
    step = "not executed yet" if use.step is None else f"step {use.step}"
    marks = ", ".join(name for name, is_so in (("void", use.void), ("provisional", use.provisional)) if is_so)
    fate = (
        f"dropped ({use.dropped})"
        if use.dropped
        else f"trained {use.trained_tokens}, masked {use.masked_tokens} tokens"
    )
    return f"  plan {use.plan} (epoch {use.epoch}), {step}{f' ({marks})' if marks else ''}: {fate}"


def _counts(counts: Mapping[int, int] | Mapping[str, int]) -> str:
    return " ".join(f"{key}:{count}" for key, count in counts.items()) or "-"
