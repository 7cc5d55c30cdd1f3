"""A pinned request waits for an engine with its weights, whatever others are ready."""

from __future__ import annotations

import pytest

from physarum.actors.rollout.router import PresenceRouter
from physarum.agents.errors import NoEngineError
from physarum.bus.presence import Heartbeat


class Present:
    """A roster as the router reads it."""

    def __init__(self, **versions: str) -> None:
        self.members = [
            Heartbeat(
                role="engine",
                instance=f"policy-{name}",
                state="ready",
                pid=1,
                host="h",
                started_at=0.0,
                sequence=1,
                facts={"group": "policy", "url": f"http://{name}", "version": version},
            )
            for name, version in versions.items()
        ]


def router(**versions: str) -> PresenceRouter:
    return PresenceRouter(Present(**versions), "policy")  # type: ignore[arg-type]


async def test_the_number_decides_and_the_epoch_does_not() -> None:
    ref = await router(a="policy@1.6", b="policy@3.7").pick(1.0, 7)
    assert ref.version == "policy@3.7"


async def test_without_a_pin_any_ready_engine_will_do() -> None:
    assert (await router(a="policy@1.6").pick(1.0)).version == "policy@1.6"


async def test_no_engine_with_these_weights_is_named() -> None:
    with pytest.raises(NoEngineError, match="was ready and served weights 8 within"):
        await router(a="policy@1.6").pick(0.01, 8)
