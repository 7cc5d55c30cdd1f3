"""What presence and queues say of a group's load. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from physarum.actors.autoscaler.policy import Signal
from physarum.actors.policy_engines import READY
from physarum.bus.presence import Heartbeat
from physarum.configs.autoscale import GroupScaling


def of_engines(config: GroupScaling, engines: Sequence[Heartbeat], waiting: float) -> Signal:
    """By the mean share of KV memory in use of the ready ones; `fine` while that is not known. `waiting`: episodes that wait
    for a place on one; where there is no engine at all they are the only word."""
    if not engines:
        return "pressed" if waiting > 0 else "fine"
    usage = [beat.numbers["kv_usage"] for beat in engines if beat.state == READY and "kv_usage" in beat.numbers]
    if not usage:
        return "fine"
    mean = sum(usage) / len(usage)
    inside = sum(beat.numbers.get("waiting", 0) for beat in engines)
    if mean > config.high or waiting + inside > 0:
        return "pressed"
    return "idle" if mean < config.low else "fine"


def of_rollouts(
    config: GroupScaling, rollouts: Sequence[Heartbeat], slots: int, queued: int, engines: Signal
) -> Signal:
    """By the share of slots taken; `queued`: tasks that nobody has taken, the only word where there is no rollout at all. More
    rollouts help no engines that are pressed."""
    if not rollouts:
        return "pressed" if queued > 0 else "fine"
    ready = [beat for beat in rollouts if beat.state == READY]
    if not ready:
        return "fine"
    share = sum(beat.numbers.get("running", 0) for beat in ready) / (slots * len(ready))
    if share > config.high and queued > 0:
        return "pressed" if engines != "pressed" else "fine"
    return "idle" if share < config.low and queued == 0 else "fine"
