"""A half of a pair that answers while it hands over takes no traffic for it: what came then would be given back once more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from physarum.actors.engine.following import HANDING_OVER, Following

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(20)]

LABEL = "policy@1.3"


class Control:
    async def live_label(self) -> str:
        return LABEL


def following(state: str) -> tuple[Following, list[str]]:
    became: list[str] = []
    made: Any = object.__new__(Following)
    made._actor = SimpleNamespace(facts={"version": LABEL}, own_state=state, become=became.append)
    made._receiver = SimpleNamespace(quarantined=None, touching=False)
    made._trials, made._control = SimpleNamespace(judging=False), Control()
    return made, became


async def test_it_stays_out_of_traffic_until_it_has_its_weights() -> None:
    one, became = following(HANDING_OVER)
    await one.check()
    assert became == []


async def test_one_that_was_silent_and_is_the_same_takes_traffic_again() -> None:
    one, became = following("unreachable")
    await one.check()
    assert became == ["ready"]
