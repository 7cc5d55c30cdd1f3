"""`samples:` how long recorded samples are kept after they were trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from physarum.configs.types import Section, refuse


def _check_keep(value: Any) -> Any:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not number and value not in ("floor", "all"):
        raise refuse(
            "`floor`, `all`, or a number of steps of at least 1", "write for example `keep: all`, or `keep: 100`"
        )
    return value


class SamplesConfig(Section):
    """`keep`: what replay and export can still read."""

    keep: Annotated[Literal["floor", "all"] | int, BeforeValidator(_check_keep)] = "floor"
    """`floor`: what the kept checkpoints need; a number: also the samples of so many last steps; `all`: every one. What
    leaves the log is then written to `archive/` before."""
    recorded: bool = False
    """The sample log was filled by `actorctl replay` or `import`; no source, rollout or reward makes samples."""
