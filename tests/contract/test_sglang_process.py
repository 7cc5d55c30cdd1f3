"""A server that cannot start says why at once; one whose owner is killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
from engine_fixture import ROOT, engine_python, tiny_model

from physarum.actors.engine.errors import EngineArgumentError, EngineDiedError, EngineStartTimeoutError
from physarum.actors.engine.process import EngineProcess, EngineSpec

pytestmark = [pytest.mark.timeout(300)]

OWNER = """
import asyncio, sys
from pathlib import Path
from physarum.actors.engine.process import EngineProcess, EngineSpec

async def main():
    python, model, log_file = map(Path, sys.argv[1:])
    process = await EngineProcess.start(EngineSpec(python=python, model=model, label="policy@1.0", log_file=log_file))
    print(process.pid, flush=True)
    await process.wait_exit()

asyncio.run(main())
"""


def spec(model: Path, tmp_path: Path, **sglang: object) -> EngineSpec:
    log_file = tmp_path / "sglang.log"
    return EngineSpec(python=engine_python(), model=model, label="policy@1.0", log_file=log_file, sglang=sglang)


@pytest.mark.asyncio
async def test_unknown_argument_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(EngineArgumentError, match="no argument mem-fraction-statik; did you mean mem-fraction-static"):
        await EngineProcess.start(spec(tmp_path, tmp_path, **{"mem-fraction-statik": 0.3}))
    assert not (tmp_path / "sglang.log").exists()


@pytest.mark.asyncio
async def test_engine_that_dies_at_start_shows_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no-such-model"}')
    process = await EngineProcess.start(spec(tmp_path / "model", tmp_path))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineDiedError, match=r"(?s)exit status.*no-such-model"):
            await process.wait_healthy(session, timeout_s=120)
    assert process.returncode not in (None, 0)


@pytest.mark.asyncio
async def test_engine_that_is_not_healthy_in_time_is_named_and_can_be_stopped(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path / "model")
    process = await EngineProcess.start(spec(tmp_path / "model", tmp_path))
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineStartTimeoutError, match=r"not healthy within 0\.5 s"):
            await process.wait_healthy(session, timeout_s=0.5)
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert descendants
    await process.stop()
    assert not [child for child in descendants if child.is_running()]
    assert await process.stop() == process.returncode


def owner_of_engine(tmp_path: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    tiny_model(0).save_pretrained(tmp_path / "model")
    arguments = [str(engine_python()), str(tmp_path / "model"), str(tmp_path / "sglang.log")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    return owner, psutil.Process(int(owner.stdout.readline()))


def descendants_when(guardian: psutil.Process, workers: int) -> list[psutil.Process]:
    """The server's processes once it has at least `workers` of them."""
    deadline = time.monotonic() + 120
    while len(found := guardian.children(recursive=True)) < workers:
        assert time.monotonic() < deadline and guardian.is_running(), "the server did not come up"
        time.sleep(0.05)
    return [guardian, *found]


@pytest.mark.slow
def test_killing_the_owner_while_its_engine_starts_leaves_no_descendant(tmp_path: Path) -> None:
    """At this moment SGLang's workers still import, and have not yet asked the kernel to die with their parent."""
    owner, guardian = owner_of_engine(tmp_path)
    family = descendants_when(guardian, workers=4)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_killing_owner_and_guardian_together_leaves_no_descendant(tmp_path: Path) -> None:
    owner, guardian = owner_of_engine(tmp_path)
    family = descendants_when(guardian, workers=4)
    deadline = time.monotonic() + 240
    while "fired up" not in (tmp_path / "sglang.log").read_text(errors="replace"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    owner.send_signal(signal.SIGKILL)
    guardian.kill()
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
