"""What a canary asks a real engine: log-probabilities as transformers has them; weights that are no numbers are refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio
from engine_fixture import VOCABULARY, LiveEngine, serve
from engine_requests import prompt

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.gate import Probe, refusal
from physarum.bus.version import Version
from physarum.configs.engine import CanaryConfig
from physarum.weightsync.manifest import Manifest

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]


@pytest_asyncio.fixture
async def control(engine: LiveEngine) -> AsyncIterator[EngineControl]:
    async with aiohttp.ClientSession() as session:
        yield EngineControl(engine.url, session)


class _Named:
    """As much of a manifest as a gate here looks at."""

    label = "policy@1.7"
    version = Version("policy", 1, 7)


def probe(control: EngineControl) -> Probe:
    manifest = cast(Manifest, _Named())
    return Probe(control.base_url, manifest, previous=None, vocabulary=VOCABULARY, timeout_s=20.0, control=control)


async def test_a_gate_sees_the_weights_that_are_on_trial(engine: LiveEngine, control: EngineControl) -> None:
    tokens = prompt(11)
    for seed in (0, 2, 0):
        await serve(engine, control, seed)
        found = await probe(control).logprobs(tokens)
        assert found == pytest.approx(engine.logprobs(seed, tokens), abs=1e-3), "nothing comes from a cache"
    assert await refusal(CanaryConfig(), probe(control)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_weights_that_are_no_numbers_are_refused(
    engine: LiveEngine, control: EngineControl, tmp_path: Path, value: float
) -> None:
    model = engine.reference(0)
    broken = tmp_path / "broken"
    state: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"].fill_(value)
    model.save_pretrained(broken, state_dict=state)
    await control.pause("retract")
    await control.update_from_disk(broken, engine.next_label(), "retract")
    await control.continue_generation()
    try:
        reason = await refusal(CanaryConfig(timeout_s=20), probe(control))
    finally:
        await serve(engine, control, seed=0)
    assert reason is not None and "log-probabilities" in reason


async def test_a_gate_that_raises_hangs_or_refuses_lets_nothing_pass(
    engine: LiveEngine, control: EngineControl
) -> None:
    await serve(engine, control, seed=0)
    here = f"{__file__}:"
    for gate, words in (
        ("raises", "the gate raised KeyError"),
        ("hangs", "the gate was not done within 0.2 s"),
        ("refuses", "number 7 is not wanted"),
    ):
        config = CanaryConfig.model_validate({"gate": here + gate, "timeout_s": 0.2})
        assert words in (await refusal(config, probe(control)) or "")


async def raises(probe: Probe) -> None:
    raise KeyError("x")


async def hangs(probe: Probe) -> None:
    await asyncio.Event().wait()


async def refuses(probe: Probe) -> None:
    from physarum.actors.engine.gate import Refused

    raise Refused(f"number {probe.manifest.version.number} is not wanted")
