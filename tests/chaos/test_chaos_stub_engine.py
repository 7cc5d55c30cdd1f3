"""The stub speaks to the product's own engine process, control and client as SGLang does, and says what it was made to."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.agents.engine_wire import Reply, build_request, parse_reply
from tests.bench.chaos_run import STUB
from tests.stub_engine import stub_tokens

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60)]

TASK = "problems/0/0/0"
PROMPT = np.arange(5, dtype=np.int32)


def weights(folder: Path, value: float) -> Path:
    """A model of one tensor."""
    folder.mkdir()
    save_file({"w": np.full(4, value, np.float32)}, folder / "model.safetensors")
    return folder


def digest(folder: Path) -> str:
    return stub_tokens.weights_digest(stub_tokens.tensor_digests(folder))


def said(folder: Path, first: int, count: int) -> list[int]:
    return [stub_tokens.token(TASK, first + index, digest(folder)) for index in range(count)]


class Stub:
    """A running stub."""

    def __init__(self, url: str, session: aiohttp.ClientSession, journal: Path) -> None:
        self.url, self.session, self.journal = url, session, journal
        self.control = EngineControl(url, session)

    async def generate(self, budget: int) -> Reply:
        body = build_request(PROMPT, {"max_new_tokens": budget}, f"{TASK}:1", None)
        async with self.session.post(f"{self.url}/generate", data=body) as response:
            assert response.status == 200
            return parse_reply(await response.read(), self.url, len(PROMPT), lambda label: label)


@pytest_asyncio.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Stub]:
    spec = EngineSpec(
        python=Path(sys.executable),
        model=weights(tmp_path / "a", 1.0),
        label="policy@1.0",
        log_file=tmp_path / "stub.log",
        sglang={"stub-step-ms": 5, "stub-mean-tokens": 1e6, "stub-log": str(tmp_path / "journal")},
        environment={"PYTHONPATH": str(STUB)},
    )
    process = await EngineProcess.start(spec, cache=tmp_path / "cache")
    try:
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, 30.0)
            yield Stub(process.url, session, tmp_path / "journal")
    finally:
        await process.stop()


async def test_every_token_is_a_function_of_task_position_and_weights(stub: Stub, tmp_path: Path) -> None:
    reply = await stub.generate(6)
    assert reply.token_ids.tolist() == said(tmp_path / "a", len(PROMPT), 6)
    assert (reply.finish_reason, reply.flaw) == ("length", None)
    assert [(span.version, span.start, span.end) for span in reply.spans] == [("policy@1.0", 0, 6)]
    assert np.isfinite(reply.logprobs).all()


async def test_an_update_in_the_middle_of_a_request_shows_in_its_spans_and_tokens(stub: Stub, tmp_path: Path) -> None:
    generating = asyncio.create_task(stub.generate(100))
    await stub.control.pause("retract")
    await stub.control.update_from_disk(weights(tmp_path / "b", 2.0), "policy@1.1", "retract")
    assert await stub.control.live_label() == "policy@1.1"
    await stub.control.continue_generation()
    reply = await generating
    border = reply.spans[0].end if reply.spans[0].version == "policy@1.0" else 0
    assert reply.spans[-1].version == "policy@1.1"
    made = said(tmp_path / "a", len(PROMPT), border) + said(tmp_path / "b", len(PROMPT) + border, 100 - border)
    assert reply.token_ids.tolist() == made


async def test_the_journal_has_every_update_and_every_reply(stub: Stub, tmp_path: Path) -> None:
    reply = await stub.generate(3)
    live, said_it = [json.loads(line) for line in stub.journal.read_text().splitlines()]
    assert (live["label"], live["weights"]) == ("policy@1.0", digest(tmp_path / "a"))
    assert (said_it["task"], said_it["start"], said_it["tokens"]) == (TASK, len(PROMPT), reply.token_ids.tolist())
