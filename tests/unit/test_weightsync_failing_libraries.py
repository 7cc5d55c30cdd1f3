"""What a transfer library or a device agent does while it fails hides neither the failure nor a cancellation."""

from __future__ import annotations

import base64
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


class Meeting(Stuck):
    """One whose transfers are done at once, and which counts the agents that it knows."""

    def __init__(self, *_: Any) -> None:
        self.known: list[str] = []
        self.state = "DONE"

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode().partition(" ")[0]
        self.known.append(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.known = [one for one in self.known if one != name]

    def transfer(self, handle: str) -> str:
        return self.state

    def check_xfer_state(self, handle: str) -> str:
        return self.state

    def release_xfer_handle(self, handle: str) -> None:
        """Lets go of it."""


def test_receivers_that_come_and_go_do_not_add_up_in_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run: hundreds of agents, each with other metadata for each version."""
    api = SimpleNamespace(nixl_agent=Meeting, nixl_agent_config=lambda backends: backends)
    monkeypatch.setattr(nixl, "_api", lambda: api)
    carrier = nixl.NixlCarrier()
    agent = cast(Meeting, carrier._agent)

    def read(metadata: str) -> None:
        place = Place(base64.b64encode(metadata.encode()).decode(), 4096, 64)
        carrier.read(place, 0, memoryview(bytearray(8)), 0.01)

    for number in range(300):
        for version in range(3):
            read(f"agent-{number} {version}")
    assert agent.known == [f"agent-{number}" for number in range(300 - nixl._REMEMBERED, 300)]
    assert len(carrier._peers) == nixl._REMEMBERED
    read("agent-0 2")  # it was forgotten, and is met again
    assert agent.known[-1] == "agent-0"
    agent.state = "PROC"
    monkeypatch.setattr(agent, "release_xfer_handle", Stuck().release_xfer_handle)
    with pytest.raises(CarrierError, match="did not read"):
        read("busy 1")
    agent.state = "DONE"
    monkeypatch.undo()
    for number in range(nixl._REMEMBERED + 9):
        read(f"later-{number}")
    assert "busy" in agent.known  # a transfer from there may be under way still


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
