"""Which actors have gone silent. Pure: heartbeats go in, names come out; the clock is our own heartbeat.

Silence is counted in our own heartbeats that came back over the bus since the actor's last one. So a bus that is away,
or a host that slept, makes nobody look dead: no heartbeat arrives then, ours as little as theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

KILL_FACTOR: Final = 3
"""An actor whose process lives is killed (and started again) after KILL_FACTOR times the limit of a warning."""


@dataclass
class Silence:
    """`heartbeat_s` is the period of our own heartbeats, `limit_s` the silence that is worth a warning."""

    heartbeat_s: float
    limit_s: float
    _beats_missed: dict[str, int] = field(default_factory=dict)

    def heard(self, instance: str) -> bool:
        """An actor's heartbeat arrived; True when it had been warned about."""
        missed = self._beats_missed.get(instance, 0)
        self._beats_missed[instance] = 0
        return missed * self.heartbeat_s >= self.limit_s

    def forget(self, instance: str) -> None:
        """Its process ended: the next one is watched from its first heartbeat."""
        self._beats_missed.pop(instance, None)

    def tick(self) -> tuple[list[str], list[str]]:
        """Our own heartbeat arrived: (actors that just passed the limit, actors that just passed KILL_FACTOR times it)."""
        suspicious: list[str] = []
        hung: list[str] = []
        for instance, missed in self._beats_missed.items():
            before_s, after_s = missed * self.heartbeat_s, (missed + 1) * self.heartbeat_s
            self._beats_missed[instance] = missed + 1
            if before_s < self.limit_s <= after_s:
                suspicious.append(instance)
            if before_s < KILL_FACTOR * self.limit_s <= after_s:
                hung.append(instance)
        return suspicious, hung
