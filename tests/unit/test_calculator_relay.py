"""The relay: who speaks, what each hears, and whose tokens are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from physarum.agents.calculator import dialogue
from physarum.agents.calculator.relay import READER, generate
from physarum.agents.calculator.reward import exact_match
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.protocols import Generation
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import Span
from physarum.configs.loader import resolve

TASK = Task(
    id="p/0/0/0", run="r", source="p", ordinal=0, group="p/0/0", group_size=1, member=0, prompt="012+030=", label="0042"
)


class Speaker:
    """Says one text as one policy; `heard` are its prompts."""

    def __init__(self, tokenizer: FolderTokenizer, name: str, text: str, other: Speaker | None = None) -> None:
        self.tokenizer, self.heard = tokenizer, list[str]()
        self._name, self._text, self._other = name, text, other

    def of(self, policy: str) -> Speaker:
        assert policy == READER and self._other is not None
        return self._other

    async def generate(self, token_ids: Any, sampling: Any = None, **more: Any) -> Generation:
        self.heard.append(self.tokenizer.decode(token_ids))
        ids = np.array(self.tokenizer.encode(self._text), np.int32)
        return Generation(
            token_ids=ids, logprobs=np.zeros(len(ids), np.float32), spans=[Span(f"{self._name}@1.0", 0, len(ids))],
            finish_reason="stop", cached_tokens=0, prompt_tokens=len(token_ids), started_at=0.0, finished_at=1.0, rid="r",
        )  # fmt: skip


@pytest.fixture
def tokenizer(tmp_path: Path) -> FolderTokenizer:
    save_tokenizer(tmp_path)
    return FolderTokenizer(tmp_path)


def trained(tokenizer: FolderTokenizer, sample: Sample) -> str:
    return tokenizer.decode(sample.token_ids[sample.prompt_len :][sample.loss_mask])


def reward(samples: list[Sample]) -> float:
    return exact_match(Execution(id="x", task=TASK, samples=samples, worker="w", started_at=0.0, finished_at=1.0))


async def test_each_policy_is_trained_on_its_own_turn(tokenizer: FolderTokenizer) -> None:
    call, answer = dialogue.call(12, 30), dialogue.answer("0042")
    reader = Speaker(tokenizer, READER, answer)
    samples = await generate(TASK, Speaker(tokenizer, "policy", call, reader))  # type: ignore[arg-type]
    assert [one.policy for one in samples] == ["policy", READER]
    assert [trained(tokenizer, one) for one in samples] == [call, answer]
    assert reader.heard == [dialogue.prompt(TASK.prompt) + call + dialogue.observation("0042")]
    assert reward(samples) == 1.0 and {one.outputs["answer"] for one in samples} == {"0042"}


@pytest.mark.parametrize(("text", "right"), [(dialogue.guess("0042"), 1.0), (dialogue.guess("0041"), 0.0), ("~~", 0.0)])
async def test_a_guess_is_the_callers_alone(tokenizer: FolderTokenizer, text: str, right: float) -> None:
    samples = await generate(TASK, Speaker(tokenizer, "policy", text))  # type: ignore[arg-type]
    assert [one.policy for one in samples] == ["policy"] and reward(samples) == right


def test_the_recipe_resolves() -> None:
    config = resolve(Path(__file__).parents[2] / "configs" / "calculator_relay.yaml")
    reader = config.of_policy(READER)
    assert (reader.trainer.groups_per_batch, config.trainer.groups_per_batch) == (8, 16)
    assert reader.trainer.lr == config.trainer.lr and list(reader.following) == [READER]
