"""`age:` how old a token may be when it is trained, and what keeps it so.

The age of a token is the number of weight-changing steps between the version that made it and the step about to begin.
"""

from __future__ import annotations

from typing import Literal

from physarum.configs.types import Natural, Section


class AgeConfig(Section):
    """Bound and the three controls: admission, in flight, consumption."""

    bound: Natural = 2
    """Largest age of a token that carries gradient."""
    admission: Literal["count", "free"] = "count"
    """`count`: at most (bound + 1) batches are accepted and running; `free`: no limit here."""
    in_flight: Literal["continue"] = "continue"
    """Generation continues over weight updates."""
    consumption: Literal["mask", "train"] = "mask"
    """`mask` takes the gradient from tokens above the bound; `train` trains and reports them."""
