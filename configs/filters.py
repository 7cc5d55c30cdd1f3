"""`filters:` which executions and groups are trained at all; what is rejected is dropped(filtered) and accounted."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from physarum.configs.hooks import Hook
from physarum.configs.types import Arguments, Count, Section


def _spelled_out(value: object) -> object:
    """A word, or one entry, for a list of one."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple({"kind": item} if isinstance(item, str) else item for item in items)


class Informative(Section):
    """Groups whose rewards differ by more than `min_spread` (dynamic sampling of DAPO): others have no advantage."""

    kind: Literal["informative"]
    min_spread: Annotated[float, Field(ge=0)] = 0.0


class PassRate(Section):
    """Groups whose mean reward lies strictly between `low` and `high`: neither hopeless nor solved."""

    kind: Literal["pass_rate"]
    low: float = 0.0
    high: float = 1.0


class GroupHook(Section):
    """A hook (headers, **args) -> bool over the headers of a group's executions (bus.records.ExecutionHeader)."""

    kind: Literal["hook"]
    hook: Hook
    args: Arguments = Field(default_factory=dict)


class Completed(Section):
    """Executions all of whose samples came to their end (status completed): truncated ones are rejected."""

    kind: Literal["completed"]


class Length(Section):
    """Executions with at most `max_tokens` trainable tokens."""

    kind: Literal["length"]
    max_tokens: Count


GroupFilter = Annotated[Informative | PassRate | GroupHook, Field(discriminator="kind")]
ExecutionFilter = Annotated[Completed | Length | GroupHook, Field(discriminator="kind")]


class FiltersConfig(Section):
    """Filters are applied in the order of the list; the first that rejects is named in the account's metrics."""

    groups: Annotated[tuple[GroupFilter, ...], BeforeValidator(_spelled_out)] = ()
    """When a group is complete."""
    executions: Annotated[tuple[ExecutionFilter, ...], BeforeValidator(_spelled_out)] = ()
    """When an execution arrives; its group goes on without it (`groups.min_members`). A hook gets a list of one header."""
    max_rejected: Count = 256
    """Groups rejected one after the other before `when_insufficient` applies: never an endless loop."""
    when_insufficient: Literal["stop", "keep"] = "stop"
    """`stop` ends the run, naming filter and counts; `keep` trains the group all the same, and counts it."""
