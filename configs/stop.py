"""`stop:` when a run is finished; the first condition met ends it."""

from __future__ import annotations

from pydantic import model_validator

from physarum.configs.types import Count, Seconds, Section, refuse


class StopConfig(Section):
    """At least one condition is required."""

    steps: Count | None = None
    """Optimizer steps."""
    samples: Count | None = None
    """Executions trained; the step that reaches the number is the last."""
    epochs: Count | None = None
    """Passes over the source's data. A source that has nothing more ends a run in any case; what is left of its last
    batch is trained as a smaller one."""
    time_s: Seconds | None = None
    """Training time, without set-up."""
    loss_below: float | None = None
    reward_above: float | None = None
    evaluated: bool | None = None
    """The start model is evaluated: there is no source, and nothing is trained (`actorctl eval`)."""

    @model_validator(mode="after")
    def _some_condition(self) -> StopConfig:
        if all(getattr(self, name) is None for name in StopConfig.model_fields):
            raise refuse(
                "at least one of " + ", ".join(f"`{name}`" for name in StopConfig.model_fields),
                "add for example `steps: 100`",
                found="no condition",
            )
        return self
