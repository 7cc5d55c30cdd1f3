"""`age:` how old a token may be when it is trained, and what keeps it so.

The age of a token is the number of weight-changing steps between the version that made it and the step about to begin.
docs/age.md says what each policy costs and when to take which.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from physarum.configs.types import Name, Natural, Section

Admission = Literal["pace", "count", "free"]
InFlight = Literal["continue", "abort"]
Consumption = Literal["mask", "drop", "wait", "train"]


class AgePolicy(Section):
    """Bound and the three controls: admission, in flight, consumption."""

    bound: Natural = 2
    """Largest age (K) of a token that carries gradient."""
    admission: Admission = "count"
    """`pace`: no task is issued that could become older than the bound before it is trained; the source waits for the
    slowest task that is out. `count`: at most (bound + 1) batches are accepted and running. `free`: as many as the streams
    hold."""
    in_flight: InFlight = "continue"
    """`continue`: generation goes on over weight updates. `abort`: with consumption `drop`, an execution whose first token
    is over the bound already is cut off, dropped(hopeless) and asked for again (`groups.refills`)."""
    consumption: Consumption = "mask"
    """`mask`: tokens above the bound lose their gradient, the rest of their sample keeps it. `drop`: an execution with such
    a token is dropped(over_age) and asked for again (`groups.refills`). `wait`: batches are made in the order of admission,
    and the trainer waits for the slowest of each. `train`: trained all the same, and counted."""


class StreamAge(Section):
    """What one source has otherwise; null takes the value of `age`."""

    bound: Natural | None = None
    admission: Admission | None = None
    in_flight: InFlight | None = None
    consumption: Consumption | None = None


class AgeConfig(AgePolicy):
    """The policy of every source, and the differences of some."""

    streams: dict[Name, StreamAge] = Field(default_factory=dict)
    """By the name of the source."""

    def of(self, source: str) -> AgePolicy:
        """The policy of the executions of `source`."""
        own = self.streams[source].model_dump(exclude_none=True) if source in self.streams else {}
        common = self.model_dump(include=set(AgePolicy.model_fields))
        return AgePolicy(**(common | own))
