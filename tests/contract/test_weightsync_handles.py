"""Weights by checkpoint-engine's protocol: what an agent offers reaches that package's receiver as it is, once for each model
of the engine; a receiver that refuses, dies or never comes costs an error by name.

The package is not among the locked ones: `CHECKPOINT_ENGINE_PATH` names a folder that has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_service import tensors
from engine_fixture import ROOT, engine_python

from physarum.actors.engine.environment import engine_environment
from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.errors import DeviceError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.snapshot import Snapshot
from physarum.weightsync.target import PauseMode
from physarum.weightsync.transports.checkpoint_engine import CheckpointEngineTransport

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

RECEIVER = ROOT / "tests" / "handle_receiver.py"
LABEL = "policy@1.1"
LIMIT_S = 150.0  # a first import of SGLang in a new environment takes most of a minute
PACKAGE = os.environ.get("CHECKPOINT_ENGINE_PATH", "")


def receiver_environment() -> dict[str, str]:
    environment = engine_environment("cpu")
    return environment | ({"PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{PACKAGE}"} if PACKAGE else {})


def has_package() -> bool:
    answer = subprocess.run(
        [str(engine_python()), "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('checkpoint_engine') is None)"],
        env=receiver_environment(), check=False,
    )  # fmt: skip
    return answer.returncode == 0


class Engine:
    """As much of an engine as an update needs; its receiver is a process in the engine's own Python."""

    def __init__(self, *arguments: str, kind: str = "plain", models: int = 1) -> None:
        self._command = [str(engine_python()), str(RECEIVER), kind]
        self._arguments = [str(models), *arguments]
        self.took: list[dict[str, Any]] = []
        self.meanwhile: Callable[[subprocess.Popen[bytes]], None] = lambda process: None

    async def update_from_handles(self, handles: Mapping[str, str], label: str, mode: PauseMode) -> None:
        (address,) = handles.values()
        command = [*self._command, address, *self._arguments]
        process = subprocess.Popen(command, env=receiver_environment(), stdout=subprocess.PIPE)
        self.meanwhile(process)
        out, _ = await asyncio.to_thread(process.communicate, timeout=LIMIT_S)
        self.took = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
        if process.returncode or any(one["error"] for one in self.took):
            raise ConnectionError(f"the engine answered 400: {self.took}")


class Rig:
    """One held version and the agent that offers it."""

    def __init__(self, folder: Path) -> None:
        area = SharedArea(folder / "area")
        self.named = tensors(1) | {"half": torch.randn(3, 5).to(torch.bfloat16)}
        snapshot = Snapshot.take(self.named.items(), 128, area, "trainer")
        entries, _ = snapshot.entries("xxh3")
        self.manifest = Manifest(
            version=Version.parse(LABEL), parent=None, model_digest="m", tensors=entries,
            total_bytes=snapshot.total_bytes, step=1, created=0.0,
        )  # fmt: skip
        area.hold("trainer", LABEL)
        snapshot.close()
        file = HeldFile.open(area, LABEL)
        assert file is not None
        self.file = file
        self.agent = DeviceAgent(engine_python(), engine_environment("cpu"), folder / "agent.log", LIMIT_S)

    def transport(self, engine: Any) -> CheckpointEngineTransport:
        return CheckpointEngineTransport(engine, self.agent, 1, LIMIT_S)

    async def update(self, engine: Any) -> None:
        transport = self.transport(engine)
        await transport.prepare(self.file, self.manifest, self.manifest.tensors)
        try:
            await transport.load(LABEL, "retract")
        finally:
            await transport.clear()

    def expected(self) -> dict[str, Any]:
        return {
            name: [str(one.dtype), list(one.shape), hashlib.sha256(one.view(torch.uint8).numpy().tobytes()).hexdigest()]
            for name, one in self.named.items()
        }


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.agent.close()
    made.file.close()


@pytest.mark.parametrize("kind", ["plain", pytest.param("package", marks=pytest.mark.slow)])
async def test_every_model_of_an_engine_gets_every_tensor(rig: Rig, kind: str) -> None:
    """A target and its draft come one after the other."""
    if kind == "package" and not has_package():
        pytest.skip("the engine's Python has no checkpoint-engine")
    engine = Engine(kind=kind, models=2)
    await rig.update(engine)
    assert [one["seen"] for one in engine.took] == [rig.expected()] * 2
    assert all(one["hooked"] and not one["error"] for one in engine.took)


@pytest.mark.parametrize(
    ("kind", "fails_at", "words"),
    [
        ("plain", "load", "no parameter of that name"),
        pytest.param("plain", "map", "cannot map it", marks=pytest.mark.slow),
        pytest.param("package", "load", "no parameter", marks=pytest.mark.slow),
    ],
)
async def test_a_receiver_that_refuses_ends_in_its_own_words(rig: Rig, kind: str, fails_at: str, words: str) -> None:
    if kind == "package" and not has_package():
        pytest.skip("the engine's Python has no checkpoint-engine")
    with pytest.raises(
        DeviceError, match=rf"answered 400.*the agent saw: .*_Refused: .*{words}".replace(".*", "(?s:.*)")
    ):
        await rig.update(Engine(fails_at, kind=kind))


@pytest.mark.slow
async def test_an_engine_that_never_comes_or_dies_on_the_way_holds_nobody_up(rig: Rig) -> None:
    class Silent:
        async def update_from_handles(self, handles: Mapping[str, str], label: str, mode: PauseMode) -> None:
            """Says yes, and takes nothing."""

    with pytest.raises(DeviceError, match=r"says that it has policy@1\.1, but GPU-\w+ never took it"):
        await rig.update(Silent())
    engine = Engine()
    engine.meanwhile = subprocess.Popen.kill
    with pytest.raises(DeviceError, match="answered 400"):
        await rig.update(engine)
    transport = rig.transport(engine)  # prepared, and given up before the engine was asked
    await transport.prepare(rig.file, rig.manifest, rig.manifest.tensors)
    await transport.clear()
    await rig.update(engine := Engine())
    assert engine.took[0]["seen"] == rig.expected()
