"""Options that contradict each other are refused, naming both and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

GRPO = """\
run: {name: quick}
model: {path: start}
source: {hook: "calculator:source"}
rollout: {generate: "calculator:generate"}
reward: {hook: "calculator:score"}
engines: {policy: {}}
trainer: {objective: grpo, lr: 1e-4}
stop: {steps: 10}
"""


def load(folder: Path, *words: str) -> RootConfig:
    path = folder / "c.yaml"
    path.write_text(GRPO)
    return resolve(path, parse_command_line(words))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["engines=null", "engines={}"], ["no `engines`", "`trainer.objective: sft`"]),
        (["rollout.generate="], ["no `rollout.generate`", "`trainer.objective: grpo`"]),
        (["reward.hook="], ["no `reward.hook`"]),
        (["bus.replicas=3"], ["`bus.replicas: 3` without `bus.url`", "docs/external-bus.md"]),
        (["trainer.ordered=true"], ["`age.bound: 2` with `trainer.ordered: true`", "set `age.bound: 0`"]),
        (["source.group_size=1"], ["`source.group_size: 1` with `trainer.objective: grpo`"]),
        (
            ["trainer.algorithm.correction=none"],
            ["`trainer.algorithm.correction: none` with `age.bound: 2`", "correction: tis`, or `age.bound: 0`"],
        ),
        (
            ["trainer.algorithm.old_logprobs=engine"],
            ["`trainer.algorithm.correction: tis` with `trainer.algorithm.old_logprobs: engine`"],
        ),
        (["trainer.ranks=3", "trainer.tp=2"], ["`trainer.ranks: 3` with `tp * pp * cp` = 2 * 1 * 1 = 2", "multiple of 2"]),
        (
            ["trainer.ranks=8", "trainer.groups_per_batch=1", "source.group_size=3"],
            ["3 executions", "8 data-parallel ranks", "raise `trainer.groups_per_batch` to 3"],
        ),
        (
            ["trainer.tokens_per_microbatch=256"],
            ["sequences of up to 257 tokens (`rollout.sampling.max_new_tokens`)", "to 257"],
        ),
        (
            ["--sglang-context-length", "16384"],
            ["`trainer.tokens_per_microbatch: 8192`", "16384", "`engines.policy.sglang.context-length`"],
        ),
        (["engines.policy.count=2", "--sglang-port", "30000"], ["`engines.policy.sglang.port` with `engines.policy.count: 2`"]),
        (["engines.policy.count=2", "engines.policy.gpus=3"], ["3 devices (`engines.policy.gpus`) for 2 instances"]),
        (
            ["trainer.gpus=1", "trainer.env={CUDA_VISIBLE_DEVICES: 0}"],
            ["`trainer.env.CUDA_VISIBLE_DEVICES` with `trainer.gpus`"],
        ),
        (["supervisor.heartbeat_s=10"], ["`supervisor.heartbeat_limit_s: 10.0` with `supervisor.heartbeat_s: 10"]),
        (["supervisor.backoff_s=60"], ["`supervisor.backoff_max_s: 30.0` with `supervisor.backoff_s: 60"]),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_options(tmp_path: Path, words: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *words)
    assert len(caught.value.problems) == 1
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "Remedy: " in str(caught.value)


def test_contradictions_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "source.group_size=1", "trainer.algorithm.correction=none", "trainer.tp=2")
    assert [problem.where for problem in caught.value.problems] == [
        "command line: source.group_size",
        "command line: trainer.algorithm.correction",
        "trainer.ranks (default)",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["age.bound=0", "trainer.algorithm.correction=none"],
        ["trainer.algorithm.correction=none", "trainer.algorithm.old_logprobs=engine"],
        ["trainer.ranks=4", "trainer.tp=2", "trainer.pp=2"],
        ["trainer.ranks=8", "trainer.groups_per_batch=1"],
        ["trainer.tokens_per_microbatch=257"],
        ["--sglang-context-length", "8192"],
        ["engines.judge={model: judge, sglang: {context-length: 100000}}"],
        ["engines.policy.gpus=[2, 3]", "engines.policy.count=2"],
    ],
)
def test_what_fits_is_accepted(tmp_path: Path, words: list[str]) -> None:
    load(tmp_path, *words)


def test_an_evaluation_needs_what_answers_and_scores(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            tmp_path, "trainer.objective=sft", "engines=null", "engines={}", "evaluation={hook: 'a:b'}", "reward.hook="
        )
    assert "`evaluation` without `engines`" in str(caught.value)
    assert "`evaluation` without `reward.hook`" in str(caught.value)
    assert len(caught.value.problems) == 2
