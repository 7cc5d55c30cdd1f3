"""Sampling parameters in the configuration, in rows and in calls: all of SGLang's, and no other; and the seeds of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from physarum.actors.source.columns import task_row
from physarum.actors.source.tasks import check_sampling, group_tasks
from physarum.actors.tools.errors import RunUnfitError
from physarum.actors.tools.sampling import _read
from physarum.agents.errors import SamplingError
from physarum.agents.held import check_sampling as check_call
from physarum.agents.seeds import Seeds
from physarum.configs.data_files import RowError
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.rows import ColumnsConfig
from physarum.configs.sampling import NAMES, REFUSED, SamplingNameError, parameters, read_sampling

CONFIG = """\
run: {name: test}
model: {path: .}
source: {hook: "physarum.agents.calculator.problems:Problems", group_size: 2}
rollout:
  generate: "physarum.agents.calculator.episode:generate"
  sampling: SAMPLING
reward: {hook: "physarum.agents.calculator.reward:exact_match"}
engines: {policy: {}}
trainer: {objective: rl, lr: 1e-4, groups_per_batch: 2}
age: {bound: 1}
stop: {steps: 10}
"""
EVERY: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "max_new_tokens": 64,
    "min_new_tokens": 2,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -1.0},
    "stop": ["END"],
    "stop_regex": "x+",
    "stop_token_ids": [2, 3],
    "ignore_eos": True,
    "no_stop_trim": True,
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "sampling_seed": 11,
    "custom_params": {"budget": 3},
    "watermark": {"key": 1},
}


def configured(tmp_path: Path, sampling: str) -> dict[str, Any]:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("SAMPLING", sampling))
    return parameters(resolve(file).rollout.sampling)


def test_every_parameter_can_be_written_and_reaches_the_request_as_it_is(tmp_path: Path) -> None:
    import json

    assert set(EVERY) == NAMES
    assert configured(tmp_path, json.dumps(EVERY)) == EVERY
    assert read_sampling(EVERY) == EVERY and check_call(EVERY) == EVERY


def test_what_is_not_written_is_not_sent(tmp_path: Path) -> None:
    assert configured(tmp_path, "{min_p: 0.1}") == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 256, "min_p": 0.1,
    }  # fmt: skip


def test_an_unknown_parameter_in_the_configuration_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `topp`.*did you mean `rollout.sampling.top_p`"):
        configured(tmp_path, "{topp: 0.9}")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"topp": 0.9}, "'topp' is no sampling parameter of SGLang; did you mean 'top_p'"),
        ({"qwertz": 1}, "use one of: custom_params"),
        ({"beam_width": 4}, "beam_width is 4; expected it to be left out"),
        ({"n": 2}, "once per sample"),
        ({"top_p": 1.5}, "top_p: found 1.5"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
        ("top_p", "expected a mapping"),
    ],
)
def test_a_row_with_another_parameter_is_broken_by_name_and_line(sampling: Any, message: str) -> None:
    raw = {"prompt": "p", "metadata": {"sampling": sampling}}
    with pytest.raises(RowError, match="file.jsonl:7: metadata.sampling") as caught:
        task_row(raw, ColumnsConfig(), "file.jsonl:7")
    assert message in str(caught.value)


def test_a_call_with_an_unknown_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SamplingError, match="did you mean 'repetition_penalty'"):
        check_call({"repetiton_penalty": 1.2})
    for name in REFUSED:
        with pytest.raises(SamplingError, match=name):
            check_call({name: 3})


def test_a_rows_own_sampling_is_laid_over_the_runs() -> None:
    row = {"prompt": "p", "metadata": {"sampling": {"top_p": 0.5, "min_p": 0.1}}}
    (task,) = group_tasks(
        row, run="r", source="main", place="0/0", first_ordinal=0, group_size=1, sampling={"top_p": 1.0, "top_k": 4}
    )
    assert task.sampling == {"top_p": 0.5, "top_k": 4, "min_p": 0.1}


def test_a_row_of_another_temperature_cannot_be_trained() -> None:
    """The trainer divides logits by the run's: its ratios to the engine's log-probabilities would be of two distributions."""
    metadata = {"sampling": {"temperature": 0.3}}
    with pytest.raises(RowError, match=r"temperature is 0.3; expected 1"):
        check_sampling(metadata, "main/0/0", 1.0)
    check_sampling(metadata, "main/0/0")
    check_sampling({"sampling": {"temperature": 1.0}}, "main/0/0", 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("temperature=0.5", "the trainer computes"),
        ("sampling_seed=3", "would not be made again"),
        ("topk=3", "did you mean 'top_k'"),
        ("top_p", "NAME=VALUE"),
        ("top_p=2", "top_p: found 2"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change: str, message: str) -> None:
    with pytest.raises(RunUnfitError, match=message):
        _read([change])


def test_changes_are_json_or_text() -> None:
    assert _read(["top_p=0.5", "stop=END", "stop_token_ids=[1, 2]"]) == {
        "top_p": 0.5, "stop": "END", "stop_token_ids": [1, 2],
    }  # fmt: skip


def test_a_seed_follows_from_task_and_prompt_alone() -> None:
    first, second = np.array([1, 2], np.int32), np.array([1, 3], np.int32)
    one, again, swapped = Seeds(0, "main/0/0/0"), Seeds(0, "main/0/0/0"), Seeds(0, "main/0/0/0")
    made = [one.next(first), one.next(second), one.next(first)]
    assert [again.next(first), again.next(second), again.next(first)] == made
    assert [swapped.next(second), swapped.next(first)] == [made[1], made[0]], "whichever comes first"
    assert len({*made, Seeds(0, "main/0/0/1").next(first), Seeds(1, "main/0/0/0").next(first)}) == 5
    assert all(0 <= seed < 1 << 31 for seed in made)


def test_names_are_refused_before_values_are_read() -> None:
    with pytest.raises(SamplingNameError, match="stream_interval is 5"):
        read_sampling({"top_p": 0.5, "stream_interval": 5})
