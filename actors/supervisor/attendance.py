"""What the supervisor knows of its actors from their heartbeats: last state, ever ready, silent."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

import msgspec

from physarum.actors.supervising import INSTANCE, SUPERVISOR
from physarum.actors.supervisor.silence import KILL_FACTOR, Silence
from physarum.bus.connection import Bus
from physarum.bus.errors import BusError
from physarum.bus.presence import GONE, Heartbeat, Roster, announce
from physarum.bus.publisher import Publisher
from physarum.configs.supervisor import SupervisorConfig

_log = logging.getLogger(__name__)

STARTING: Final = "starting"
FINISHED: Final = "finished"
_ANNOUNCE_S: Final = 1.0


class Attendance:
    """`on_hung` is called with the instance of an actor that is silent for KILL_FACTOR * supervisor.heartbeat_limit_s."""

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        config: SupervisorConfig,
        on_hung: Callable[[str], None],
        me: str = INSTANCE,
        mine: Callable[[str, str], bool] = lambda role, instance: True,
    ) -> None:
        """`me`: the supervisor's own instance; `mine` says of (role, instance) whether this machine has that actor."""
        self._bus, self._publisher = bus, publisher
        self._me, self._mine = me, mine
        # The head looks at the whole run; a thousand others that heard everybody would be more than a bus carries.
        self.roster = Roster(bus, on_beat=self._on_beat, named=me != INSTANCE)
        self._limit_s, self._period_s = config.heartbeat_limit_s, config.heartbeat_s
        self._ticked_at = -math.inf
        self._silence = Silence(config.heartbeat_s, config.heartbeat_limit_s)
        self._on_hung = on_hung
        self._last: dict[str, Heartbeat] = {}
        self._ready_pids: set[int] = set()

    async def expect(self, role: str, instance: str) -> None:
        """An actor of this machine is heard from now on."""
        if self._me != INSTANCE:
            await self.roster.listen_to(role, instance)

    def state(self, instance: str, pid: int) -> str:
        """The last state that process `pid` announced; "starting" before its first heartbeat."""
        beat = self._last.get(instance)
        return beat.state if beat is not None and beat.pid == pid else STARTING

    def was_ready(self, pid: int) -> bool:
        """Whether process `pid` ever announced a state past "starting"."""
        return pid in self._ready_pids

    def forget(self, instance: str) -> None:
        """Its process has ended as it should: its silence is none."""
        self._silence.forget(instance)

    async def ended(self, instance: str, pid: int) -> None:
        """Its process is known to be gone: says so for it, so that others need not wait for its presence to expire."""
        self._silence.forget(instance)
        self._ready_pids.discard(pid)
        last = self._last.pop(instance, None)
        if last is None or last.pid != pid:
            return
        self.roster.forget(last.role, instance)
        goodbye = msgspec.structs.replace(last, state=GONE, sequence=last.sequence + 1)
        try:
            await announce(self._bus, self._publisher, goodbye, timeout_s=_ANNOUNCE_S)
        except BusError as error:
            _log.info("the end of %s was not announced: %s", instance, error)

    def _on_beat(self, beat: Heartbeat) -> None:
        last = self._last.get(beat.instance)
        if beat.state == GONE or (last is not None and (last.pid, last.sequence) == (beat.pid, beat.sequence)):
            return
        self._last[beat.instance] = beat
        if beat.instance == self._me:
            self._own_beat()
        elif beat.role != SUPERVISOR and self._mine(beat.role, beat.instance):
            self._heard(beat)

    def _heard(self, beat: Heartbeat) -> None:
        if beat.state not in (STARTING, "draining"):
            self._ready_pids.add(beat.pid)
        if self._silence.heard(beat.instance):
            _log.warning("%s/%s is heard again", beat.role, beat.instance)

    def _own_beat(self) -> None:
        """Beats that waited for a bus that was away come all at once, before those of the actors: they count as one."""
        now = time.monotonic()
        if now - self._ticked_at >= self._period_s / 2:
            self._ticked_at = now
            self._tick()

    def _tick(self) -> None:
        suspicious, hung = self._silence.tick()
        for instance in suspicious:
            _log.warning(
                "%s lives but has been silent for %g s (supervisor.heartbeat_limit_s); it is killed and started again"
                " after %g s",
                *(instance, self._limit_s, KILL_FACTOR * self._limit_s),
            )
        for instance in hung:
            self._on_hung(instance)
