"""An engine that other machines reach: nobody without the key has an answer of it, and the key is on no command line."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from engine_fixture import ROOT, engine_python, tiny_model

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.errors import EngineRefusedError
from physarum.actors.engine.opening import Opening, key_file
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.agents.engine_key import engine_key

KEY = engine_key("of the test")


async def check(spec: EngineSpec) -> None:
    process = await EngineProcess.start(spec)
    try:
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, timeout_s=240)
            assert process.announced == process.url.replace("127.0.0.1", "127.0.0.2")
            assert not key_file(spec.log_file).exists(), "it was read"
            assert stat.S_IMODE(spec.log_file.stat().st_mode) == 0o600
            for url in (process.url, process.announced):
                info = await EngineControl(url, session, key=process.key).model_info()
                assert info["weight_version"] == "policy@1.0"
                for wrong in (None, "another"):
                    with pytest.raises(EngineRefusedError, match="401"):
                        await EngineControl(url, session, key=wrong).model_info()
        with spec.log_file.open("a") as log:
            log.write(f"server_args=(api_key='{KEY}')\n")
        assert "api_key='***'" in str(process.death()) and KEY not in str(process.death())
        commands = [" ".join(child.cmdline()) for child in psutil.Process(process.pid).children(recursive=True)]
        assert commands and not any(KEY in command for command in commands)
    finally:
        await process.stop()


async def test_the_stub_asks_for_the_key(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path / "model")
    await check(made(tmp_path, Path(sys.executable), {"PYTHONPATH": str(ROOT / "tests" / "stub_engine")}))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_sglang_asks_for_the_key(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path / "model")
    await check(made(tmp_path, engine_python(), {}))


def made(folder: Path, python: Path, environment: dict[str, str]) -> EngineSpec:
    return EngineSpec(
        python=python,
        model=folder / "model",
        label="policy@1.0",
        log_file=folder / "policy-0.sglang.log",
        environment=environment,
        opening=Opening("127.0.0.2", KEY),
    )
