"""An engine that is started without weights gets its first version by checkpoint-engine's protocol, and then takes traffic.

A real SGLang and the package's own receiver, on CPU (tests/checkpoint_engine_cpu). The package is not among the locked ones:
`CHECKPOINT_ENGINE_PATH` names a folder that has it.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import aiohttp
import pytest
from actor_fixture import make_context, running
from checkpoint_service import TOKEN, running_service
from engine_fixture import ROOT, LiveEngine, engine_python, tiny_model
from test_external_engine import announced, publish, until

from physarum.actors.engine.actor import EngineActor
from physarum.actors.engine.control import EngineControl
from physarum.actors.weights_area import weights_area
from physarum.bus.connection import Bus
from physarum.bus.publisher import Publisher
from physarum.configs.sglang_arguments import WAITS_FOR_WEIGHTS
from physarum.weightsync.area import SharedArea
from physarum.weightsync.transports import registry

PACKAGE = os.environ.get("CHECKPOINT_ENGINE_PATH", "")
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not PACKAGE, reason="CHECKPOINT_ENGINE_PATH names no folder with checkpoint-engine"),
]


async def test_it_serves_the_first_version_and_nothing_before(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTS_TOKEN", TOKEN)
    kinds = tuple(
        dataclasses.replace(kind, lacks=lambda found: "") if kind.name == "checkpoint_engine" else kind
        for kind in registry.KINDS
    )
    monkeypatch.setattr(registry, "KINDS", kinds)  # which refuses it on CPU
    path = f"{ROOT / 'tests' / 'checkpoint_engine_cpu'}{os.pathsep}{PACKAGE}"
    context = make_context(
        tmp_path, bus, publisher, "engine", "checkpoint.token_env=WEIGHTS_TOKEN", "supervisor.heartbeat_s=0.2",
        f"engines.policy.python={engine_python()}", f"engines.policy.env.PYTHONPATH={path}",
        f"engines.policy.sglang={{{WAITS_FOR_WEIGHTS}: true, load-format: dummy, skip-tokenizer-init: true}}",
        instance="policy-0",
    )  # fmt: skip
    context.folder.path.mkdir(exist_ok=True)
    context.folder.logs.mkdir(exist_ok=True)
    model = tmp_path / "model"
    tiny_model(0).save_pretrained(model)
    context.folder.start_model.symlink_to(model, target_is_directory=True)
    made = EngineActor(context)
    session = aiohttp.ClientSession()
    reference = LiveEngine(None, model, tmp_path)  # type: ignore[arg-type]  # its weights and labels alone
    tokens = [5, 6, 7, 8, 9, 10]
    async with (
        session,
        running_service(tmp_path / "service") as service,
        announced(bus, publisher, service),
        running(made),
    ):
        await until(lambda: made.state == "waiting for weights", 200.0)
        control = EngineControl(made.facts["url"], session)
        assert "version" not in made.facts and await control.live_label() == "start"
        for seed in (2, 3):
            label = await publish(made, reference, service, session, seed)
            await until(lambda label=label: made.facts.get("version") == label and made.state == "ready", 60.0)
            found = await control.prompt_logprobs(tokens, 30.0)
            assert found == pytest.approx(reference.logprobs(seed, tokens), abs=1e-3)
    SharedArea.remove_of_run(weights_area(context.folder, context.config, only_look=True).folder)
    SharedArea.remove_of_run(context.folder.path)
