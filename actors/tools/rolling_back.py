"""Withdraws versions: training goes on from an earlier checkpoint as a new epoch, and engines get its weights.

    hold --> withdraw record (moves the ledger's end) --> the trainer at work is refused, and is started anew
         --> checkpoint of the good version, new epoch, published --> held until `resume`

Exact: the record itself disposes of what was withdrawn, whatever dies meanwhile.
"""

from __future__ import annotations

import time
import uuid
from typing import Final

import msgspec

from physarum.actors import policies, states
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError, RunUnfitError, ToolError
from physarum.actors.trainer.recovery import Recovery, recover
from physarum.bus import ledger, names
from physarum.bus.codec import encode
from physarum.bus.errors import WrongSequenceError
from physarum.bus.ledger import DurableRecord, Numbered, PlanRecord, WithdrawRecord
from physarum.bus.register import Register
from physarum.bus.version import Version

_ATTEMPTS: Final = 20


class RolledBack(msgspec.Struct, frozen=True):
    """`to`: the version from which training goes on; `withdrawn_plans`: how many plans were given up with what was after it."""

    to: str
    withdrawn_plans: int
    held: bool


async def roll_back(run: OpenRun, label: str, reason: str, hold: bool) -> RolledBack:
    """Withdraws everything after `label`. Raises NotInRunError where it has no checkpoint, RunUnfitError."""
    version, run = Version.parse(label), run.of_label(label)
    if run.finished:
        raise RunUnfitError(
            f"run {run.name} is finished: no trainer will go on; fork it from a checkpoint (actorctl fork)"
        )
    if run.config.trainer.ordered:
        raise RunUnfitError(
            "trainer.ordered repeats the recorded steps exactly, so none of them can be withdrawn; fork the run"
        )
    _found(run, recover(await ledger.read(run.bus, key=run.ledger)), version)
    if hold:
        await _holds(run).put(states.Hold(f"{label} holds, {reason}", time.time()), *_key(run))
    for _ in range(_ATTEMPTS):  # a trainer that is at work writes, too
        records = await ledger.read(run.bus, key=run.ledger)
        recovery = recover(records)
        chosen = _found(run, recovery, version)
        record = WithdrawRecord(
            epoch=recovery.last_epoch, number=chosen.number, last_plan=chosen.last_plan, reason=reason
        )
        try:
            await run.publisher.publish(
                names.subject(run.name, run.ledger, "record"),
                encode(record),
                message_id=f"ledger/withdraw/{uuid.uuid4().hex}",
                expect_last_sequence=recovery.last_sequence,
                wait_when_full=False,
            )
        except WrongSequenceError:
            continue
        return RolledBack(label, _plans_after(records, chosen.last_plan), hold)
    raise ToolError(f"the ledger moved {_ATTEMPTS} times while {label} was to be restored; try again")


async def release(run: OpenRun) -> bool:
    """Lets the policy's trainer go on; False: it was not held."""
    holds = _holds(run)
    held = (await holds.get(*_key(run))).value
    if held is None or held.released:
        return False
    await holds.put(msgspec.structs.replace(held, released=True), *_key(run))
    return True


def _holds(run: OpenRun) -> Register[states.Hold]:
    return Register(run.bus, run.publisher, "run", states.Hold)


def _key(run: OpenRun) -> tuple[str, ...]:
    return policies.key(states.HOLD, run.config.policy)


def _found(run: OpenRun, recovery: Recovery, version: Version) -> DurableRecord:
    model = run.config.model.name
    there = [one for one in recovery.durables if (run.folder.checkpoints / one.folder).is_dir()]
    for one in there:
        if Version(model, one.epoch, one.number) == version:
            return one
    labels = ", ".join(str(Version(model, one.epoch, one.number)) for one in there) or "none yet"
    raise NotInRunError(f"there is no checkpoint of {version} to go on from; there are: {labels}")


def _plans_after(records: list[Numbered], last_plan: int) -> int:
    gone = {item.sequence for item in ledger.withdrawn_plans(records)}
    return sum(
        isinstance(item.record, PlanRecord) and item.sequence > last_plan and item.sequence not in gone
        for item in records
    )
