"""What a trainer at work can be asked for: a checkpoint now, and to expect a dead member after all."""

from __future__ import annotations

import asyncio
from typing import Any

from physarum.actors.dead_letters import dead_task
from physarum.actors.trainer.intake import Intake
from physarum.actors.trainer.readiness import Readiness
from physarum.actors.trainer.stepping import Stepper
from physarum.bus import log
from physarum.bus.connection import Bus


class Requests:
    """Answers control verbs while the trainer trains."""

    def __init__(self, bus: Bus, stepper: Stepper, intake: Intake, readiness: Readiness) -> None:
        self._bus, self._stepper, self._intake, self._readiness = bus, stepper, intake, readiness

    async def checkpoint(self) -> dict[str, Any]:
        """Makes the state after the present step durable. The answer names the checkpoint; the caller has the deadline."""
        saved: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        async def save() -> None:
            durable = await self._stepper.checkpoint()
            if not saved.done():
                saved.set_result({"folder": durable.folder, "number": durable.number, "digest": durable.digest})

        self._readiness.ask(save)
        return await saved

    async def revive(self, letter: int) -> dict[str, Any]:
        """The group of the letter's task waits for it again, unless it has gone on without it."""
        dead = dead_task(await log.get(self._bus, "dead", letter), self._bus.run)
        if dead is not None and dead.source is not None and not dead.evaluation:
            self._intake.revive(dead)
        return {"letter": letter}
