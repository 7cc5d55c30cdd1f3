"""An SGLang that waits for its first weights gets them, and the next ones, by checkpoint-engine's receiver through CUDA IPC:
its log-probabilities are those of transformers. Needs checkpoint-engine in the engine's Python; skips plainly elsewhere."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_fixture import START_TIMEOUT_S, engine_path, engine_python, tiny_model

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from physarum.actors.engine.control import EngineControl  # noqa: E402
from physarum.actors.engine.environment import engine_environment  # noqa: E402
from physarum.actors.engine.process import EngineProcess, EngineSpec  # noqa: E402
from physarum.actors.engine.readiness import until_healthy  # noqa: E402
from physarum.agents.connections import open_session  # noqa: E402
from physarum.bus.version import Version  # noqa: E402
from physarum.configs.sglang_arguments import WAITS_FOR_WEIGHTS  # noqa: E402
from physarum.weightsync.area import SharedArea  # noqa: E402
from physarum.weightsync.device.owner import DeviceAgent  # noqa: E402
from physarum.weightsync.manifest import Manifest  # noqa: E402
from physarum.weightsync.receiver import Receiver  # noqa: E402
from physarum.weightsync.snapshot import Snapshot  # noqa: E402
from physarum.weightsync.staging import Staging  # noqa: E402
from physarum.weightsync.transports.checkpoint_engine import CheckpointEngineTransport  # noqa: E402

TOKENS = [7, 21, 33, 40, 52, 61, 75, 80]
LIMIT_S = 120.0
TOLERANCE = 0.2
"""Of bfloat16, where one version differs from the next by nats."""


@dataclass
class Rig:
    """A server with dummy weights, the area that its versions are in, and the receiver between them."""

    control: EngineControl
    receiver: Receiver
    area: SharedArea
    reference: Any

    def hold(self, number: int) -> Manifest:
        """The reference's weights as a version of this host."""
        version = Version("policy", 1, number)
        snapshot = Snapshot.take(self.reference.state_dict().items(), 1 << 20, self.area, f"trainer-{version}")
        entries, _ = snapshot.entries("xxh3")
        self.area.hold(f"trainer-{version}", str(version))
        snapshot.close()
        return Manifest(
            version=version, parent=None, model_digest="m", tensors=entries, total_bytes=snapshot.total_bytes, step=1,
            created=0.0,
        )  # fmt: skip

    async def worst(self) -> float:
        """The largest difference of a log-probability to transformers."""
        found = await self.control.prompt_logprobs(TOKENS, LIMIT_S)
        with torch.no_grad():
            logits = self.reference(torch.tensor([TOKENS])).logits[0, :-1]
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        return float((torch.tensor(found) - chosen).abs().max())


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    python, environment = engine_python(), engine_environment("cuda", engine_path())
    asked = subprocess.run([str(python), "-c", "import checkpoint_engine"], env=environment, check=False)
    if asked.returncode:
        pytest.skip("the engine's Python has no checkpoint-engine")
    model = tmp_path / "model"
    # Kernels for norms have no float32: both sides hold the same bfloat16 weights.
    reference = tiny_model(0, head_dim=64).to(torch.bfloat16).float()
    reference.save_pretrained(model)
    arguments = {
        # There is no tokenizer, and a prompt of no tokens ends a server that waits: its own first request would be one.
        "skip-tokenizer-init": True,
        "dtype": "bfloat16", "load-format": "dummy", "mem-fraction-static": 0.3, "max-total-tokens": 16384,
        "attention-backend": "triton",
        "sampling-backend": "pytorch", "grammar-backend": "none", "disable-cuda-graph": True, "disable-radix-cache": True,
        WAITS_FOR_WEIGHTS: True,
    }  # fmt: skip
    spec = EngineSpec(python=python, model=model, label="start", log_file=tmp_path / "sglang.log", sglang=arguments,
                      environment=engine_path())  # fmt: skip
    process = await EngineProcess.start(spec)
    agent = DeviceAgent(python, environment, tmp_path / "agent.log", LIMIT_S)
    try:
        async with open_session() as session:
            await process.wait_healthy(session, START_TIMEOUT_S, empty=True)
            control = EngineControl(process.url, session, update_timeout_s=LIMIT_S)
            area = SharedArea(tmp_path / "area")
            transport = CheckpointEngineTransport(control, agent, 1, LIMIT_S)
            receiver = Receiver(control, Staging(area, "engine-0"), session, transport=transport)
            yield Rig(control, receiver, area, reference.eval())
            await receiver.close()
    finally:
        agent.close()
        await process.stop()


async def test_a_server_that_waits_gets_its_first_weights_and_then_what_changes(rig: Rig) -> None:
    first = await rig.receiver.apply(rig.hold(1), [], None)
    await until_healthy(rig.control)
    assert first.transport == "checkpoint_engine" and await rig.control.live_label() == "policy@1.1"
    assert await rig.worst() < TOLERANCE
    with torch.no_grad():
        rig.reference.model.norm.weight.add_(0.5)
    assert await rig.worst() > 4 * TOLERANCE
    second = await rig.receiver.apply(rig.hold(2), [], None)
    assert second.bytes_applied < first.bytes_applied / 10
    assert await rig.control.live_label() == "policy@1.2" and await rig.worst() < TOLERANCE
