"""Numbers and states as people read them; shared by the live table, the plain lines and `actorctl ps`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from physarum.actors.display.view import RunView

STATE_STYLES: Final = {
    "ready": "green",
    "working": "green",
    "finished": "green",
    "starting": "yellow",
    "restarting": "red",
    "paused": "yellow",
    "standby": "cyan",
    "draining": "yellow",
    "dead": "red",
}


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def amount(value: float) -> str:
    """1234567 -> 1.2M; "-" for what is not a number."""
    if not math.isfinite(value):
        return "-"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.1f}" if value != int(value) else str(int(value))


def duration(seconds: float) -> str:
    """75 -> 1:15; 3700 -> 1:01:40."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def facts(numbers: Mapping[str, float], limit: int = 4) -> str:
    """An actor's own numbers, as many as fit on a line."""
    return "  ".join(f"{name} {amount(value)}" for name, value in list(numbers.items())[:limit])


def step_line(view: RunView, now: float) -> str:
    """One training step on one line."""
    step = view.step
    assert step is not None  # called when a step was reported
    done, total = view.progress
    parts = [f"{view.name}: step {done}/{total}" if total else f"{view.name}: step {done}"]
    if step.reward is not None:
        parts.append(f"reward {step.reward:.3f}")
    if step.loss is not None:
        parts.append(f"loss {step.loss:.4f}")
    if view.version is not None:
        parts.append(f"version {view.version}")
    if step.ages:
        parts.append("age " + " ".join(f"{age}:{tokens}" for age, tokens in sorted(step.ages.items())))
    parts += [
        f"{view.samples_per_s(now):.1f} samples/s",
        f"{amount(view.tokens_per_s(now))} tokens/s",
        f"waited {step.wait_s:.1f} s, step {step.seconds:.1f} s",
    ]
    return "  ".join(parts)
