"""One real SGLang server per test session, on a Qwen3 of 0.2 million parameters made on the spot.

Tests change its weights; each begins with `await serve(engine, control, seed)` and so knows what it serves.
`PHYSARUM_ENGINE_PYTHON` names an interpreter with sglang; by default that of .venv-engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.process import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300.0
VOCABULARY = 512


def engine_python() -> Path:
    apart = ROOT / ".venv-engine" / "bin" / "python"
    return Path(os.environ.get("PHYSARUM_ENGINE_PYTHON") or (apart if apart.exists() else sys.executable))


def engine_path() -> dict[str, str]:
    """Where sglang lies when it is not in that interpreter's own packages: engines are told, they inherit nothing."""
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}


def tiny_model(seed: int, head_dim: int = 32) -> PreTrainedModel:
    """Random weights with a spread that makes log-probabilities differ by nats from one seed to another."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).to(torch.float32).eval()


@dataclass
class LiveEngine:
    """The running server, the folder it was started from (seed 0), and version numbers nobody has used yet."""

    process: EngineProcess
    model: Path
    folder: Path
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    models: dict[int, PreTrainedModel] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.process.url

    def next_label(self) -> str:
        return f"policy@1.{next(self.numbers)}"

    def reference(self, seed: int) -> PreTrainedModel:
        """The same weights in transformers."""
        if seed not in self.models:
            self.models[seed] = tiny_model(seed)
        return self.models[seed]

    def weights(self, seed: int) -> Path:
        """A Hugging Face folder with the weights of `seed`."""
        folder = self.folder / f"seed-{seed}"
        if not folder.exists():
            self.reference(seed).save_pretrained(folder)
        return folder

    def logprobs(self, seed: int, token_ids: list[int]) -> list[float]:
        """Log-probability, by transformers, of each token but the first given those before it."""
        import torch

        with torch.no_grad():
            logits = self.reference(seed)(torch.tensor([token_ids])).logits[0, :-1]
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(token_ids[1:])[:, None])
        return [float(value) for value in chosen[:, 0]]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    folder = tmp_path_factory.mktemp("engine")
    model = folder / "seed-0"
    tiny_model(0).save_pretrained(model)
    # A loop of its own, set nowhere: tests run theirs beside it.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        process = runner.run(start_engine(model, folder / "sglang.log"))
        try:
            yield LiveEngine(process, model, folder)
        finally:
            runner.run(process.stop())


async def start_engine(model: Path, log_file: Path) -> EngineProcess:
    arguments: dict[str, Any] = {"skip-tokenizer-init": True, "max-total-tokens": 32768}
    spec = EngineSpec(python=engine_python(), model=model, label="policy@1.0", log_file=log_file, sglang=arguments)
    process = await EngineProcess.start(spec)
    try:
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, START_TIMEOUT_S)
    except BaseException:
        await process.stop()
        raise
    return process


async def serve(engine: LiveEngine, control: EngineControl, seed: int) -> str:
    """Puts the weights of `seed` into the idle engine; returns the label it then serves them under."""
    label = engine.next_label()
    await control.pause("retract")
    await control.update_from_disk(engine.weights(seed), label, "retract")
    await control.continue_generation()
    return label
