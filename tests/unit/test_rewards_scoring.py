"""`reward.type` as a hook: the text that is judged, and the type that a row names itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.rewards.answer import answer_of
from physarum.agents.rewards.errors import RewardError
from physarum.agents.rewards.scoring import score
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus.records import Execution, Sample, Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


def execution(folder: Path, *turns: str, tool: str = "", label: Any = None, **outputs: Any) -> Execution:
    """The policy's turns, with what a tool said between them."""
    tokenizer = FolderTokenizer(folder)
    ids, mask = tokenizer.encode("q"), []
    for index, turn in enumerate(turns):
        if index:
            ids += (said := tokenizer.encode(tool))
            mask += [False] * len(said)
        ids += (said := tokenizer.encode(turn))
        mask += [True] * len(said)
    sample = Sample(
        token_ids=np.array(ids, np.int32), prompt_len=1, loss_mask=np.array(mask, np.bool_),
        logprobs=np.zeros(len(mask), np.float32), origin="demonstration", outputs=outputs,
    )  # fmt: skip
    task = Task(
        id="main/0/3/0", run="r", source="main", ordinal=0, group="g", group_size=1, member=0, label=label, prompt="q"
    )
    return Execution(id="e", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=1.0)


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (["12<|im_end|>"], "12"),
        (["12<|im_end|><|endoftext|><|endoftext|>"], "12"),
        (["<think>a</think>b<|im_end|>"], "<think>a</think>b"),  # special tokens that end nothing are kept
        (["call", "12"], "12"),
        ([""], ""),
    ],
)
def test_the_last_turn_of_the_policy_is_judged(folder: Path, turns: list[str], text: str) -> None:
    made = execution(folder, *turns, tool="the tool says 99")
    assert answer_of(made, FolderTokenizer(folder)).text == text


def test_a_judge_may_read_the_whole_history(folder: Path) -> None:
    made = execution(folder, "call", "12<|im_end|>", tool="|99|")
    assert answer_of(made, FolderTokenizer(folder)).transcript() == "qcall|99|12<|im_end|>"


def test_an_episode_may_say_itself_what_its_answer_was(folder: Path) -> None:
    assert answer_of(execution(folder, "raw", response="said"), FolderTokenizer(folder)).text == "said"


def test_a_model_without_a_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"tokenizer\.json does not exist.*outputs\['response'\]"):
        answer_of(execution(folder, "x"), FolderTokenizer(tmp_path))


async def scored(made: Execution, folder: Path, rm_type: Any = None, **spec: Any) -> Any:
    if rm_type is not None:
        made.task.metadata = {"rm_type": rm_type}
    given = {"name": "exact", "args": {}, "row_types": {}, **spec}
    return await score(made, **given, folder=str(folder))


async def test_a_row_names_its_own_type_else_the_runs_counts(folder: Path) -> None:
    made = execution(folder, r"so \boxed{0.5}", label="1/2")
    assert await scored(made, folder) == 0.0
    assert await scored(made, folder, "math") == 1.0
    assert await scored(made, folder, " ") == 0.0


async def test_the_prefix_gives_only_what_is_boxed(folder: Path) -> None:
    made = execution(folder, r"so \boxed{the cat} it is", label="cat")
    assert await scored(made, folder, "f1") == pytest.approx(1 / 3)  # "boxedthe" is a word
    assert await scored(made, folder, "boxed_f1") == 1.0
    assert await scored(execution(folder, "cat", label="cat"), folder, "boxed_exact") == 0.0


async def test_boxed_math_needs_no_second_box(folder: Path) -> None:
    assert await scored(execution(folder, r"\boxed{0.5}", label="1/2"), folder, "boxed_math") == 1.0


async def test_options_belong_to_their_type(folder: Path) -> None:
    made = execution(folder, "Cat", label="cat")
    case = {"normalise": ["case"]}
    assert await scored(made, folder, args=case) == 1.0
    assert await scored(made, folder, "exact", args=case) == 1.0
    assert await scored(made, folder, "exact", name="f1", row_types={"exact": case}) == 1.0
    assert await scored(made, folder, "exact", name="f1", args={}) == 0.0


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("exakt", "did you mean `exact`"),
        ("boxed_format", "write `format`"),
        (7, "which is no reward; write a text"),
        ("regex", r"add `reward\.row_types\.regex"),
        ("boxed_regex", r"add `reward\.row_types\.boxed_regex"),
    ],
)
async def test_a_type_that_a_row_may_not_name(folder: Path, named: Any, words: str) -> None:
    with pytest.raises(RewardError, match=f"task main/0/3/0 names metadata.rm_type .*{words}"):
        await scored(execution(folder, "x", label="x"), folder, named)


async def test_a_listed_type_may_be_named(folder: Path) -> None:
    rows = {"regex": {"pattern": "^x$"}}
    assert await scored(execution(folder, "x", label="y"), folder, "regex", row_types=rows) == 1.0
