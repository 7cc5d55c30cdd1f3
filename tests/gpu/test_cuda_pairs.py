"""A real prefill and a real decode server, Mooncake between them: log-probabilities are those of transformers, whoever moves.

Needs mooncake-transfer-engine in the engine's Python, and CUDA: SGLang's prefill code pins memory. `PHYSARUM_PAIRS_PATH` is put
on the engines' PYTHONPATH; a folder there may stand in for what a host without CUDA lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from engine_fixture import START_TIMEOUT_S, engine_path, engine_python, tiny_model

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.environment import detect_device
from physarum.actors.engine.handing_over import hand_over
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.agents.asking import ask_pair
from physarum.agents.connections import open_session
from physarum.agents.engine_wire import Reply, build_request
from physarum.agents.pairs import MovedError, Prefill, PrefillError, room_at
from physarum.agents.routing import EngineRef
from physarum.configs.servers import ServerRole

EXTRA = os.environ.get("PHYSARUM_PAIRS_PATH", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(detect_device() != "cuda" and not EXTRA, reason="needs a CUDA device"),
]
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TOLERANCE = 1e-4 if detect_device() == "cpu" else 0.5
"""On CUDA in bfloat16, where one version differs from another by nats."""
ON_CUDA: dict[str, Any] = {
    "dtype": "bfloat16", "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
    "disable-cuda-graph": True,
}  # fmt: skip
HEAD_DIM = 32 if detect_device() == "cpu" else 64


@dataclass
class Servers:
    prefill: EngineProcess
    decode: EngineProcess
    first: EngineControl
    second: EngineControl
    session: aiohttp.ClientSession

    async def ask(self, tokens: list[int], count: int, version: str) -> Reply:
        assert self.prefill.bootstrap_port is not None
        half = Prefill(url=self.prefill.url, instance="p-0", host="127.0.0.1", port=self.prefill.bootstrap_port)
        ref = EngineRef(self.decode.url, "d-0", version, 1, prefill=half)
        prompt = np.asarray(tokens, np.int32)
        body = build_request(prompt, {"max_new_tokens": count}, f"t:{time.time()}", version, room_at(half))
        async with asyncio.timeout(90):
            return await ask_pair(self.session, ref, body, len(tokens), 60.0, lambda: None)


def reference(seed: int, prompt: list[int], reply: Reply) -> np.ndarray:
    import torch

    ids = prompt + reply.token_ids.tolist()
    with torch.no_grad():
        logits = tiny_model(seed, HEAD_DIM)(torch.tensor([ids])).logits[0, :-1]
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])
    return np.asarray(chosen[len(prompt) - 1 :, 0])


def close(seed: int, prompt: list[int], reply: Reply) -> bool:
    return bool(np.abs(reply.logprobs - reference(seed, prompt, reply)).max() < TOLERANCE)


@contextlib.asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[Servers]:
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    environment |= {"PYTHONPATH": EXTRA} if EXTRA else engine_path()
    found = subprocess.run([engine_python(), "-c", "import mooncake.engine"], env=os.environ | environment, check=False)
    if found.returncode:
        pytest.skip("no mooncake-transfer-engine in the engine's Python")
    async with contextlib.AsyncExitStack() as stack:
        processes: list[EngineProcess] = []
        session = await stack.enter_async_context(open_session())
        roles: tuple[ServerRole, ...] = ("prefill", "decode")
        for role in roles:
            arguments: dict[str, Any] = {
                "skip-tokenizer-init": True,
                "max-total-tokens": 16384,
                "mem-fraction-static": 0.2,
            }
            arguments |= {"disaggregation-transfer-backend": "mooncake_tcp"}
            if detect_device() == "cuda":
                arguments |= ON_CUDA
            elif role == "decode":
                arguments["disaggregation-decode-retraction-backup"] = "none"
            spec = EngineSpec(
                python=engine_python(),
                model=folder / "seed-0",
                label="policy@1.0",
                log_file=folder / f"{role}.log",
                sglang=arguments,
                environment=environment,
                role=role,
            )
            processes.append(await EngineProcess.start(spec))
            stack.push_async_callback(processes[-1].stop)
            # One after the other: two servers that look for free ports at once may find the same.
            await processes[-1].wait_healthy(session, START_TIMEOUT_S)
        controls = [EngineControl(process.url, session) for process in processes]
        yield Servers(processes[0], processes[1], controls[0], controls[1], session)


async def take(control: EngineControl, folder: Path, label: str) -> None:
    """As a half of a pair takes a version once it has given back what it had."""
    await control.pause("in_place")
    await control.update_from_disk(folder, label, "in_place")
    await control.continue_generation()


async def test_every_kept_token_of_a_pair_has_the_log_probability_of_its_version(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_model(seed, HEAD_DIM).save_pretrained(tmp_path / f"seed-{seed}")
    async with servers(tmp_path) as pair:
        reply = await pair.ask(PROMPT, 8, "policy@1.0")
        assert close(0, PROMPT, reply) and reply.flaw is None and len(reply.token_ids) == 8
        going = asyncio.create_task(pair.ask(PROMPT, 1500, "policy@1.0"))
        await asyncio.sleep(1.5)
        await hand_over(pair.second)
        partial = await going
        assert partial.finish_reason == "abort" and close(0, PROMPT, partial)
        held = PROMPT + partial.token_ids.tolist()
        for control in (pair.first, pair.second):
            await take(control, tmp_path / "seed-1", "policy@1.1")
        assert close(1, held, await pair.ask(held, 8, "policy@1.1"))
        await take(pair.first, tmp_path / "seed-0", "policy@1.2")
        with pytest.raises(PrefillError, match=r"held the request under policy@1\.2"):
            await pair.ask(PROMPT, 8, "policy@1.1")
        await take(pair.second, tmp_path / "seed-0", "policy@1.2")
        going = asyncio.create_task(pair.ask(PROMPT, 400, "policy@1.2"))
        await asyncio.sleep(0.8)
        await take(pair.second, tmp_path / "seed-1", "policy@1.3")
        cut = await going
        assert {span.version for span in cut.spans} == {"policy@1.2"} and close(0, PROMPT, cut)
        with pytest.raises(MovedError):
            await pair.ask(PROMPT, 8, "policy@1.2")
        await pair.prefill.stop()
        with pytest.raises(PrefillError, match="failed"):
            await pair.ask(PROMPT, 8, "policy@1.3")
        assert (await pair.second.loads()).running == 0
