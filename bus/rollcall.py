"""A roll call: what changed in the presence of a role, told to everybody by one process.

Where n processes listen to the heartbeats of n others the server delivers n^2 messages per beat. From `CROWD` members on, one
process that hears them all (the janitor) tells what changed, in one message for all listeners, each LAZY_S at most, or SOON_S
after somebody came, went or changed its state:

    n heartbeats --> Teller --one message with what changed--> n rosters

Invariant: whatever is missed is told again within `RETELL_S`, so no message has to arrive, and a teller that takes over needs
nothing of the one before it. What is told is as young as the teller's own view plus LAZY_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from physarum.bus.presence import RETELL_S, TICK_S, Heartbeat, RollCall

CROWD: Final = 64
"""Members of the roles that are told; half as many end it."""
SOON_S: Final = 0.1
"""For each 500 members that there are."""
LAZY_S: Final = 0.5
_MOST: Final = 200
"""Members in one message: about 100 KB."""


class _Told(msgspec.Struct):
    beat: Heartbeat
    at: float


class Teller:
    """Decides what is told, and when; `now` is monotonic seconds, given by the caller."""

    def __init__(self, roles: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._told: dict[str, dict[str, _Told]] = {role: {} for role in roles}
        self._at = dict.fromkeys(self._told, 0.0)
        self._clock = clock
        self.open, self.soon_s = False, SOON_S

    def look(self, members: Iterable[Heartbeat]) -> Iterator[tuple[str, RollCall]]:
        """(role, what to tell its listeners now)."""
        present: dict[str, dict[str, Heartbeat]] = {role: {} for role in self._told}
        for beat in members:
            if beat.role in present:
                present[beat.role][beat.instance] = beat
        count = sum(map(len, present.values()))
        self.soon_s = SOON_S * max(1.0, count / 500)
        was_open, self.open = self.open, count >= CROWD or (self.open and count >= CROWD // 2)
        for role, there in present.items():
            if self.open:
                yield from ((role, call) for call in self._calls(role, there))
            elif was_open:
                self._told[role] = {}
                yield role, RollCall(open=False)

    def _calls(self, role: str, there: dict[str, Heartbeat]) -> Iterator[RollCall]:
        told, now = self._told[role], self._clock()
        gone = [name for name in told if name not in there]
        news = [beat for name, beat in there.items() if _is_news(told.get(name), beat, now)]
        waited_s = now - self._at[role]
        urgent = bool(gone) or any(_is_urgent(told.get(beat.instance), beat) for beat in news)
        if not (urgent or (news and waited_s >= LAZY_S) or waited_s >= TICK_S):
            return
        self._at[role] = now
        for name in gone:
            del told[name]
        told.update({beat.instance: _Told(beat, now) for beat in news})
        for start in range(0, max(1, len(news)), _MOST):
            yield RollCall(open=True, beats=[_bare(one) for one in news[start : start + _MOST]], gone=gone)


def _is_news(told: _Told | None, beat: Heartbeat, now: float) -> bool:
    if _is_urgent(told, beat):
        return True
    assert told is not None
    return told.beat.facts != beat.facts or now - told.at >= RETELL_S


def _is_urgent(told: _Told | None, beat: Heartbeat) -> bool:
    return told is None or (told.beat.started_at, told.beat.state) != (beat.started_at, beat.state)


def _bare(beat: Heartbeat) -> Heartbeat:
    return msgspec.structs.replace(beat, numbers={}, loop_lag_s=0.0, progress_at=0.0)
