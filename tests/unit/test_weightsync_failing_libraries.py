"""What a transfer library or a device agent does while it fails hides neither the failure nor a cancellation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from physarum.weightsync.carriers import nixl
from physarum.weightsync.carriers.carrier import Place
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.errors import CarrierError, DeviceError
from physarum.weightsync.target import WeightTarget
from physarum.weightsync.transports.checkpoint_engine import CheckpointEngineTransport

pytestmark = pytest.mark.timeout(20)


class Stuck:
    """A NIXL agent whose transfers never end, and cannot be let go while they are under way."""

    def __init__(self, *_: Any) -> None:
        """As the library's."""

    def add_remote_agent(self, metadata: bytes) -> str:
        return "other"

    def get_xfer_descs(self, *_: Any) -> str:
        return "descriptions"

    def initialize_xfer(self, *_: Any) -> str:
        return "handle"

    def transfer(self, handle: str) -> str:
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return "PROC"

    def release_xfer_handle(self, handle: str) -> None:
        raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")


def test_a_read_that_cannot_be_let_go_is_still_a_read_that_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    api = SimpleNamespace(nixl_agent=Stuck, nixl_agent_config=lambda backends: backends)
    monkeypatch.setattr(nixl, "_api", lambda: api)
    carrier = nixl.NixlCarrier()
    with pytest.raises(CarrierError, match="did not read 8 bytes within 0.01 s"):
        carrier.read(Place("QQ==", 4096, 64), 0, memoryview(bytearray(8)), 0.01)


@pytest.mark.asyncio
async def test_an_offer_whose_agent_ended_is_cleared_away() -> None:
    class Gone:
        calls: int = 0

        def call(self, name: str, *_: Any, **__: Any) -> dict[str, Any]:
            self.calls += 1
            raise DeviceError("the device agent ended")

    class Refusing:
        async def update_from_handles(self, *_: Any) -> None:
            raise RuntimeError("no such parameter")

    agent = Gone()
    transport = CheckpointEngineTransport(cast(WeightTarget, Refusing()), cast(DeviceAgent, agent), 1, 1.0)
    transport._handles = {"GPU-0": "ipc:///nowhere"}
    with pytest.raises(DeviceError, match="no such parameter; the agent saw: the device agent ended"):
        await transport.load("policy@1.1", "retract")
    transport._handles = {"GPU-0": "ipc:///nowhere"}
    await transport.clear()
    await transport.clear()
    assert agent.calls == 2
