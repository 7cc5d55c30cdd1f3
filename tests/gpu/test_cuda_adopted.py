"""What a trainer hands to the sender of its broadcasts is its own memory, also of a small model: each version is read there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from physarum.actors.trainer.broadcasting import adopted  # noqa: E402
from physarum.weightsync.device.multilinear import digests  # noqa: E402
from physarum.weightsync.device.owner import DeviceAgent  # noqa: E402
from physarum.weightsync.device.snapshot import FlatBuffer  # noqa: E402

LIMIT_S = 60.0


@pytest.mark.parametrize("size", [4096, 1_379_840, 64 << 20])
def test_an_agent_sees_each_version_in_the_trainers_memory(tmp_path: Path, size: int) -> None:
    agent = DeviceAgent(Path(sys.executable), os.environ, tmp_path / "agent.log", LIMIT_S)
    buffer = FlatBuffer(1 << 20)
    tensor = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
    buffer.take({"a": tensor}.items)
    try:
        agent.call("adopt", LIMIT_S, buffer=adopted(buffer))
        for _ in range(5):
            tensor.add_(1)
            buffer.take({"a": tensor}.items)
            found = agent.call("digests", LIMIT_S, pieces=[(0, size)])["digests"]
            assert buffer.memory is not None
            assert found == digests(buffer.memory, [(0, size)])
    finally:
        agent.close()
