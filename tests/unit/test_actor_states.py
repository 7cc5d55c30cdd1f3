"""What an actor announces while it is paused, and while it drains."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from physarum.actors.context import Context
from physarum.actors.runtime import PAUSED, Actor


class Idle(Actor):
    role = "idle"

    async def run(self) -> None:
        return


def actor() -> tuple[Idle, Any]:
    context = SimpleNamespace(
        config=None, bus=None, publisher=None, paused=False, draining=asyncio.Event(), identity="run/idle/idle-0"
    )
    return Idle(cast(Context, context)), context


def test_what_happens_while_it_is_paused_does_not_make_it_ready() -> None:
    idle, context = actor()
    idle.become("ready")
    idle.become(PAUSED)
    context.paused = True
    idle.become("quarantined")
    assert (idle.state, idle.behind_pause) == (PAUSED, "quarantined")
    context.paused = False
    idle.become(idle.behind_pause)
    assert idle.state == "quarantined"


def test_a_paused_one_can_end_and_a_draining_one_only_that() -> None:
    idle, context = actor()
    idle.become(PAUSED)
    context.paused = True
    idle.become("draining")
    context.draining.set()
    idle.become("ready")
    assert idle.state == "draining"
    idle.become("finished")
    assert idle.state == "finished"
