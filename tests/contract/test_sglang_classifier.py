"""A reward model on the real SGLang: its scores are those of transformers' own pass, alone and in a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_fixture import START_TIMEOUT_S, engine_python

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.agents.calculator.tokenizer import VOCABULARY_SIZE, save_tokenizer
from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.classifier import conversation, score_classifier
from physarum.agents.rewards.errors import BackendRefusedError
from physarum.configs.reward_types import ClassifierReward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def reward_model(folder: Path, outputs: int) -> Any:
    """A Llama with a head, of random weights whose scores differ."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=0, num_labels=outputs, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).to(torch.float32).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


def expected(folder: Path, model: Any, answer: Answer) -> list[float]:
    """By transformers alone."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(conversation(answer), tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return [float(one) for one in model(input_ids=ids).logits[0]]


@pytest.fixture(scope="module", params=[1, 2], ids=["reward", "two outputs"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Any]]:
    folder = tmp_path_factory.mktemp("classifier")
    model = reward_model(folder / "model", request.param)
    spec = EngineSpec(
        python=engine_python(), model=folder / "model", label="frozen", log_file=folder / "log",
        sglang={"max-total-tokens": 8192, "is-embedding": True},
    )  # fmt: skip

    async def start() -> EngineProcess:
        process = await EngineProcess.start(spec)
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, START_TIMEOUT_S)
        return process

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        process = runner.run(start())
        try:
            yield process.url, folder / "model", model
        finally:
            runner.run(process.stop())


async def test_scores_are_those_of_transformers_alone_and_together(served: tuple[str, Path, Any]) -> None:
    url, folder, model = served
    outputs = model.config.num_labels
    options = ClassifierReward(url=url, model=str(folder), output=outputs - 1, cache_entries=0, deadline_s=60)
    answers = [
        Answer(text=f"{one * 37 % 10000:04d}" * (1 + one % 7), prompt="123+456=", task=str(one)) for one in range(32)
    ]
    wanted = [expected(folder, model, one)[outputs - 1] for one in answers]
    try:
        alone = await score_classifier(answers[0], options)
        together = await asyncio.gather(*(score_classifier(one, options) for one in answers))
    finally:
        await backend_for(options).close()
    assert alone == pytest.approx(wanted[0], abs=1e-3)
    assert together == pytest.approx(wanted, abs=1e-3)
    assert max(wanted) - min(wanted) > 0.1, "a test that any number passes"


async def test_a_text_longer_than_the_context_is_refused_once_and_not_cut(served: tuple[str, Path, Any]) -> None:
    url, folder, _ = served
    options = ClassifierReward(url=url, model=str(folder), deadline_s=60)
    try:
        with pytest.raises(BackendRefusedError, match="HTTP 400"):
            await score_classifier(Answer(text="7" * 400, prompt="1+1=", task="t"), options)
    finally:
        await backend_for(options).close()


async def test_an_engine_actor_can_follow_the_load_of_a_classifier(served: tuple[str, Path, Any]) -> None:
    url, _, _ = served
    async with aiohttp.ClientSession() as session:
        control = EngineControl(url, session)
        await control.health()
        longest = (await control.capabilities()).longest_tokens
        assert longest is not None and 200 < longest <= 256
        assert (await control.loads()).running == 0
