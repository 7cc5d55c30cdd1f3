"""The chaos benchmark's judge finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest

from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import Span
from tests.bench.chaos_check import Journal, wrong_tokens
from tests.stub_engine import stub_tokens

pytestmark = pytest.mark.chaos

TASK = "s/0/0/0"
WEIGHTS = {"policy@1.0": "aa", "policy@1.1": "bb"}
PROMPT = 2


def tokens(labels: list[str]) -> list[int]:
    return [stub_tokens.token(TASK, PROMPT + at, WEIGHTS[label]) for at, label in enumerate(labels)]


def execution(labels: list[str], made: list[int]) -> Execution:
    spans = [Span(label, at, at + 1) for at, label in enumerate(labels)]
    sample = Sample(
        token_ids=np.asarray([1] * PROMPT + made, np.int32),
        prompt_len=PROMPT,
        loss_mask=np.ones(len(made), np.bool_),
        logprobs=np.zeros(len(made), np.float32),
        spans=spans,
    )
    task = Task(id=TASK, run="r", source="s", ordinal=0, group="s/0/0", group_size=1, member=0)
    return Execution(id="x", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=0.0)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    labels = ["policy@1.0", "policy@1.0", "policy@1.1"]
    spans = [
        {"version": "policy@1.0", "start": 0, "end": 2},
        {"version": "policy@1.1", "start": 2, "end": 3},
    ]
    lines = [{"kind": "live", "label": label, "weights": digest} for label, digest in WEIGHTS.items()]
    lines.append({"kind": "reply", "task": TASK, "start": PROMPT, "tokens": tokens(labels), "spans": spans})
    path = tmp_path / "journal"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + b'{"kind": "rep')  # killed in mid-line
    found = Journal(path)
    found.read_on()
    return found


def test_what_the_stub_said_is_right(journal: Journal) -> None:
    labels = ["policy@1.0", "policy@1.0", "policy@1.1"]
    assert wrong_tokens(execution(labels, tokens(labels)), journal) == 0
    assert journal.ambiguous == []


def test_a_token_under_the_label_of_other_weights_is_found(journal: Journal) -> None:
    labels = ["policy@1.0", "policy@1.0", "policy@1.1"]
    relabelled = ["policy@1.0", "policy@1.1", "policy@1.1"]
    assert wrong_tokens(execution(relabelled, tokens(labels)), journal) > 0


def test_tokens_that_no_engine_made_are_found(journal: Journal) -> None:
    labels = ["policy@1.0"] * 3
    assert wrong_tokens(execution(labels, tokens(labels)), journal) == 3


def test_a_label_that_stood_for_two_sets_of_weights_is_found(journal: Journal) -> None:
    journal.weights["policy@1.1"].add("cc")
    assert journal.ambiguous == ["policy@1.1"]


def test_environment_tokens_are_nobodys(journal: Journal) -> None:
    labels = ["policy@1.0", "policy@1.0", "policy@1.1"]
    whole = execution(labels, tokens(labels))
    sample = whole.samples[0]
    longer = msgspec.structs.replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, np.asarray([9], np.int32)]),
        loss_mask=np.concatenate([sample.loss_mask, [False]]),
        logprobs=np.concatenate([sample.logprobs, np.asarray([np.nan], np.float32)]),
        spans=[*sample.spans[:2], Span("policy@1.1", 2, 4)],
    )
    assert wrong_tokens(msgspec.structs.replace(whole, samples=[longer]), journal) == 0
