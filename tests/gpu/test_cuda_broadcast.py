"""Broadcasts over NCCL between two cards: verified on the device, and a receiver that is killed in the middle costs the
sender its deadline only. Skips plainly where there are fewer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

from physarum.actors.trainer.broadcasting import adopted  # noqa: E402
from physarum.weightsync.device.multilinear import digests  # noqa: E402
from physarum.weightsync.device.owner import DeviceAgent  # noqa: E402
from physarum.weightsync.device.snapshot import FlatBuffer  # noqa: E402
from physarum.weightsync.errors import DeviceError  # noqa: E402

LIMIT_S = 60.0
SIZE = 4 << 30
SMALL = 1_379_840
"""Bytes of the quick start's model."""


class Pair:
    """A sender on the first card and a receiver on the second."""

    def __init__(self, tmp_path: Path, size: int = SIZE) -> None:
        python = Path(sys.executable)
        self.sender = DeviceAgent(python, os.environ, tmp_path / "sender.log", LIMIT_S)
        self.receiver = DeviceAgent(
            python, {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path / "receiver.log", LIMIT_S
        )
        self.buffer = FlatBuffer(4 << 20)
        self.tensor = torch.randint(-100, 100, (size // 4,), dtype=torch.int32, device="cuda:0")
        self.buffer.take({"a": self.tensor}.items)
        self.name, self.port, self.groups = "", 0, 0

    def form(self) -> None:
        self.sender.close()
        self.groups += 1
        self.name = f"1.{self.groups}"
        self.port = self.sender.call("open", LIMIT_S, host="127.0.0.1")["port"]
        self.sender.call("adopt", LIMIT_S, buffer=adopted(self.buffer))

    def send(self, label: str, limit_s: float) -> dict[str, Any]:
        arguments = {"name": self.name, "label": label, "layout": self.buffer.layout(), "size": self.buffer.size_bytes,
                     "members": 1, "timeout_s": limit_s}  # fmt: skip
        return self.sender.call("send", limit_s + 30, arguments=arguments)

    def receive(self, label: str, limit_s: float) -> dict[str, Any]:
        arguments = {"host": "127.0.0.1", "port": self.port, "name": self.name, "label": label, "rank": 1, "members": 1,
                     "timeout_s": limit_s}  # fmt: skip
        return self.receiver.call("receive", limit_s + 30, arguments=arguments)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.sender.close()
    made.receiver.close()


async def test_a_small_model_arrives_time_after_time(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SMALL)
    pair.form()
    for number in range(20):
        pair.tensor.add_(1)
        pair.buffer.take({"a": pair.tensor}.items)
        await asyncio.gather(
            asyncio.to_thread(pair.send, f"v{number}", LIMIT_S), asyncio.to_thread(pair.receive, f"v{number}", LIMIT_S)
        )
        found = pair.receiver.call("digests", LIMIT_S, pieces=[(0, SMALL)])["digests"]
        assert pair.buffer.memory is not None
        assert found == digests(pair.buffer.memory, [(0, SMALL)])
    pair.sender.close()
    pair.receiver.close()


async def test_four_gibibytes_arrive_verified_and_a_receiver_killed_in_the_middle_delays_by_its_deadline(
    pair: Pair,
) -> None:
    pair.form()
    for number in range(3):
        pair.tensor.add_(1)
        pair.buffer.take({"a": pair.tensor}.items)
        sent, _ = await asyncio.gather(
            asyncio.to_thread(pair.send, f"v{number}", LIMIT_S), asyncio.to_thread(pair.receive, f"v{number}", LIMIT_S)
        )
        found = pair.receiver.call("digests", LIMIT_S, pieces=[(0, SIZE)])["digests"]
        assert found == digests(pair.tensor.view(torch.uint8), [(0, SIZE)])
        assert sent["bytes"] == SIZE
    for delay_s in (0.0, 0.005):
        sending = asyncio.create_task(asyncio.to_thread(pair.send, f"late{delay_s}", 5.0))
        receiving = asyncio.create_task(asyncio.to_thread(pair.receive, f"late{delay_s}", 5.0))
        await asyncio.sleep(delay_s)
        assert pair.receiver.pid is not None
        os.kill(pair.receiver.pid, signal.SIGKILL)
        began = time.monotonic()
        found_by = await asyncio.gather(sending, receiving, return_exceptions=True)
        assert isinstance(found_by[1], DeviceError)
        assert time.monotonic() - began < 40
        pair.receiver.close()
        pair.form()
        await asyncio.gather(
            asyncio.to_thread(pair.send, f"again{delay_s}", LIMIT_S),
            asyncio.to_thread(pair.receive, f"again{delay_s}", LIMIT_S),
        )
