"""Slots whose records say more, or less, than their processes know: writes unheard of, holders that just began, bad reads."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from physarum.bus import slots as module
from physarum.bus.errors import PublishTimeoutError
from physarum.bus.presence import GONE, Heartbeat, Roster
from physarum.bus.slots import Holder, Slot, SlotRecord, Slots

pytestmark = pytest.mark.timeout(20)

ME, OTHER = Holder("rollout", "rollout-0", 1.0), Holder("rollout", "rollout-1", 5.0)
BUS = SimpleNamespace(run="run", client=SimpleNamespace(is_connected=True))


class Register:
    """The slots of one name."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[int, SlotRecord | None]] = {}
        self.answers = True

    async def clear(self, revision: int, *key: str) -> None:
        if not self.answers:
            raise PublishTimeoutError("not acknowledged")
        assert self.stored[int(key[-1])][0] == revision
        self.stored[int(key[-1])] = (revision + 1, None)


def slots(register: Register, roster: Any) -> Slots:
    found = Slots(BUS, None, "box", 2, ME, roster)  # type: ignore[arg-type]  # what they use of a bus
    found._register = register  # type: ignore[assignment]

    async def read() -> dict[int, tuple[int, SlotRecord | None]]:
        if not register.answers:
            raise PublishTimeoutError("not read")
        return dict(register.stored)

    found._read = read  # type: ignore[method-assign]
    return found


def beat(holder: Holder, state: str = "ready", sequence: int = 1) -> Heartbeat:
    return Heartbeat(
        role=holder.role, instance=holder.instance, state=state, pid=1, host="h", started_at=holder.started_at,
        sequence=sequence,
    )  # fmt: skip


async def test_a_slot_that_could_not_be_given_back_is_when_another_process_asks_for_one() -> None:
    """Else it would be nobody's, as long as this process lives and needs none."""
    register = Register()
    one = slots(register, None)
    register.stored[0] = (7, SlotRecord(*ME, time.time()))
    register.stored[1] = (8, SlotRecord(*ME, time.time()))
    one._held[1] = Slot(1, 8)
    register.answers = False
    with pytest.raises(PublishTimeoutError):
        await one.release(Slot(0, 7))
    wants: Any = SimpleNamespace(subject="ph.run.changed.lease.slot.box.wanted", data=b"rollout-1")
    await one._on_change(wants)
    await asyncio.gather(*one._giving)
    register.answers = True
    await one._on_change(wants)
    await asyncio.gather(*one._giving)
    assert register.stored[0][1] is None
    assert register.stored[1][1] is not None, "that one is held"


async def test_the_slot_of_a_process_that_just_began_is_not_taken_from_it() -> None:
    """A roll call tells of it later than the slot does."""
    roster = Roster(BUS, "rollout")  # type: ignore[arg-type]
    one = slots(Register(), roster)
    found: dict[int, tuple[int, SlotRecord | None]] = {0: (3, SlotRecord(*OTHER, time.time()))}
    assert not one._is_free(0, found, set()), "not heard of yet"
    roster._take(beat(OTHER))
    roster._take(beat(OTHER, GONE, 2))
    assert one._is_free(0, found, set()), "heard, and gone"
    later = {0: (3, SlotRecord(*OTHER._replace(started_at=9.0), time.time() - 11))}
    assert one._is_free(0, later, set()), "silent since it took the slot"


async def test_after_an_outage_a_lost_slot_is_heard_of_although_the_first_read_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    register, back = Register(), asyncio.Event()
    one = slots(register, None)
    one._bus = SimpleNamespace(reconnections=lambda: back)  # type: ignore[assignment]
    slot = one._held[0] = Slot(0, 7)
    register.stored[0], register.answers = (9, SlotRecord(*OTHER, time.time())), False
    reading = asyncio.create_task(one._reread())
    back.set()
    await asyncio.sleep(0.03)
    back.clear()
    register.answers = True
    await asyncio.wait_for(slot.lost.wait(), 5)
    reading.cancel()
