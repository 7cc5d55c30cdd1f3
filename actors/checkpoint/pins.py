"""The versions that users pinned, those that engines would go back to, and those that are (to be) evaluated, as the checkpoint
service asks for them before it lets old ones go."""

from __future__ import annotations

import logging

from physarum.actors import states
from physarum.actors.context import Context
from physarum.bus.errors import BusError
from physarum.bus.register import Register
from physarum.weightsync.canary import Trial

_log = logging.getLogger(__name__)


async def pinned(context: Context) -> frozenset[str] | None:
    """Their labels, of every policy; None, with a warning, where the bus does not say: then nothing may be let go."""
    try:
        found = [await _pinned(context, view.model.name) for view in context.config.views()]
    except BusError as error:
        _log.warning("no version is let go, since nobody says which are pinned: %s", error)
        return None
    return frozenset().union(*found)


async def _pinned(context: Context, model: str) -> frozenset[str]:
    register = Register(context.bus, context.publisher, "weights", states.Pins)
    heads = Register(context.bus, context.publisher, "weights", states.Head)
    trials = Register(context.bus, context.publisher, "weights", Trial)
    entry = await register.get(states.PINS, model)
    evaluated = (await heads.get(states.EVAL_HEAD, model)).value
    due = (await register.get(states.EVAL_DUE, model)).value
    head = (await heads.get(states.HEAD, model)).value
    tried = [one.holding(head.withdrawn if head else ()) for one in await trials.entries(states.CANARY, model)]
    held = {*(due.labels if due else ()), *([evaluated.label] if evaluated else ())}
    passed = {trial.passed for trial in tried if trial.passed is not None}
    return frozenset(entry.value.labels if entry.value else ()) | passed | held
