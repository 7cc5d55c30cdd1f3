"""Functions written for slime score our executions: by sample, in batches, with its names and its reward_key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.rewards.custom import score
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.slime_sample import SampleStatus, slime_samples
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import Span

FUNCTIONS = Path(__file__).parents[1] / "slime_functions.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


def execution(folder: Path, *responses: str) -> Execution:
    tokenizer = FolderTokenizer(folder)
    samples = []
    for response in responses:
        ids, prompt = tokenizer.encode(response), tokenizer.encode("1+1=")
        samples.append(
            Sample(
                token_ids=np.array([*prompt, *ids], np.int32), prompt_len=len(prompt),
                loss_mask=np.array([True] * (len(ids) - 1) + [False]), logprobs=np.full(len(ids), -0.5, np.float32),
                spans=[Span("1.2", 0, 1), Span("1.3", 1, len(ids))],
            )
        )  # fmt: skip
    task = Task(
        id="main/0/7/1", run="r", source="main", ordinal=29, group="main/0/7", group_size=4, member=1,
        prompt="1+1=", label="2", metadata={"level": 3},
    )  # fmt: skip
    return Execution(id="e", task=task, samples=samples, worker="w", started_at=0.0, finished_at=1.0)


async def scored(folder: Path, name: str, *responses: str, batched: bool = False, **args: Any) -> list[Any]:
    made = execution(folder, *responses)
    return await score(made, function=f"{FUNCTIONS}:{name}", args=args, batched=batched, folder=str(folder))


def test_slimes_names_hold_slimes_values(folder: Path) -> None:
    (sample,) = slime_samples(execution(folder, "2<|im_end|>"), FolderTokenizer(folder))
    assert (sample.prompt, sample.response, sample.label, sample.metadata) == ("1+1=", "2<|im_end|>", "2", {"level": 3})
    assert len(sample.tokens) == 6 and sample.response_length == 2 and sample.loss_mask == [1, 0]
    assert sample.rollout_log_probs == [-0.5, -0.5] and sample.weight_versions == ["1.2", "1.3"]
    assert (sample.index, sample.group_index, sample.status) == (29, 7, SampleStatus.COMPLETED)


async def test_each_sample_is_scored_by_itself(folder: Path) -> None:
    assert await scored(folder, "length", "abc", "ab", scale=0.5) == [1.0, 0.5]


async def test_of_a_dict_the_reward_key_counts(folder: Path) -> None:
    assert await scored(folder, "graded", "2<|im_end|>", "33<|im_end|>", reward_key="score") == [1.0, 0.0]
    (whole,) = await scored(folder, "graded", "2<|im_end|>")
    assert whole == {"score": 1.0, "pred": "2<|im_end|>", "level": 3}
    with pytest.raises(RewardError, match=r"returned the keys \['level', 'pred', 'score'\]; expected 'reward'"):
        await scored(folder, "graded", "2<|im_end|>", reward_key="reward")


async def test_a_batch_is_all_samples_of_the_execution(folder: Path) -> None:
    assert await scored(folder, "ranked", "abc", "ab", "abcd", batched=True) == [1.0, 0.0, 2.0]
    with pytest.raises(RewardError, match=r"returned 1\.0 for 2 samples; expected a list"):
        await scored(folder, "forgetful", "ab", "ab", batched=True)


async def test_what_slime_has_and_we_have_not_fails_by_name(folder: Path) -> None:
    with pytest.raises(AttributeError, match="multimodal_inputs"):
        await scored(folder, "curious", "ab")
    with pytest.raises(AttributeError, match="scale"):
        await scored(folder, "length", "ab")
