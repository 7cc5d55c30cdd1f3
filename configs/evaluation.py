"""`evaluation:` held-out problems, scored outside the account of executions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from physarum.configs.hooks import Hook
from physarum.configs.rows import RowsConfig
from physarum.configs.sampling import SamplingConfig
from physarum.configs.types import Arguments, Count, Name, Seconds, Section, refuse

ONLY_SET: Final = "main"
"""The name of the set that `evaluation` itself describes."""


class OwnHook(Section):
    """A hook in the place of the run's, and its arguments."""

    hook: Hook
    args: Arguments = Field(default_factory=dict)


class EvaluationSet(RowsConfig):
    """Rows as a source has them, and how they are answered and judged; `columns` and `chat` are the source's where they are
    null."""

    problems: Count | None = 256
    """At most; null takes every row."""
    samples: Count = 1
    """Answers to each problem."""
    pass_at: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """The k of pass@k that are reported; none may be above `samples`."""
    solved_at: float = 1.0
    """An answer with at least this reward solves its problem (pass@k)."""
    sampling: SamplingConfig | None = None
    """Null: `evaluation.sampling`."""
    generate: OwnHook | None = None
    """In the place of `rollout.generate`."""
    reward: OwnHook | None = None
    """In the place of `reward.hook`, in a process of its own."""

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationSet:
        above = [k for k in self.pass_at if k > self.samples]
        if above:
            raise refuse(
                f"`pass_at` within `samples: {self.samples}`",
                f"set `samples: {max(above)}`, or lower `pass_at`",
                found=f"pass@{max(above)}",
            )
        return self


class EvaluationConfig(EvaluationSet):
    """One set, or several by name; which versions are evaluated, and for how long."""

    alternatives: ClassVar[tuple[str, ...]] = (*RowsConfig.alternatives, "sets")

    sets: Annotated[dict[Name, EvaluationSet], Field(min_length=1)] | None = None
    """Each of them is scored at every version that is evaluated; the score is the mean of theirs."""
    at_start: bool = True
    at_end: bool = True
    every_versions: Count | None = None
    """Published versions between evaluations; null evaluates only at start and end."""
    overflow: Literal["skip", "wait"] = "skip"
    """When a version is due while another is being evaluated: `skip` goes on with the newest then; `wait` evaluates every one
    that was due, in order (needs `engines`); what still waits when training ends is left."""
    timeout_s: Seconds = 600.0
    """For each set."""
    engines: Name | None = None
    """A group of engines that answers nothing but evaluations, so that these take nothing from training, and that stays at the
    version which is being evaluated. Null: the policy's, which go on to newer versions."""

    def named(self) -> dict[str, EvaluationSet]:
        """Every set by its name."""
        return {ONLY_SET: self} if self.sets is None else dict(self.sets)

    def parts(self) -> list[tuple[tuple[Any, ...], EvaluationSet]]:
        """Each section that names an origin, with its key below `evaluation`."""
        return [((), self)] if self.sets is None else [(("sets", name), part) for name, part in self.sets.items()]

    def sampling_of(self, part: EvaluationSet) -> SamplingConfig:
        """How the answers to a set are drawn."""
        return part.sampling or self.sampling or SamplingConfig()
