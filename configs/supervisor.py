"""`supervisor:` how actors are watched, restarted and stopped."""

from __future__ import annotations

from typing import Final

from physarum.configs.types import Bytes, Natural, Seconds, Section

LONGEST_HEARTBEAT_S: Final = 5.0
"""Half of what everybody else waits for one (bus/presence.py): at longer intervals all actors would come and go."""


class SupervisorConfig(Section):
    """More than `max_restarts` of one actor within `window_s` is a named failure of the run, unless others do the same work:
    then it is left out, and tried again later."""

    max_restarts: Natural = 5
    window_s: Seconds = 300.0
    backoff_s: Seconds = 0.5
    """Wait before the first restart; it doubles up to `backoff_max_s`."""
    backoff_max_s: Seconds = 30.0
    heartbeat_s: Seconds = 2.0
    heartbeat_limit_s: Seconds = 10.0
    """An actor silent for this long is taken for dead."""
    drain_timeout_s: Seconds = 30.0
    join_timeout_s: Seconds = 1800.0
    """A machine that is not the head waits this long for the bus, and for the head to open the run."""
    log_bytes: Bytes = 64 << 20
    """A log in `logs/` that grows above it becomes `NAME.log.1`; the one before it goes."""
