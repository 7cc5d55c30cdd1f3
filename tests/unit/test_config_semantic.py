"""Options that contradict each other are refused, naming both and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.bus.presence import EXPIRY_S
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig
from physarum.configs.supervisor import LONGEST_HEARTBEAT_S

GRPO = """\
run: {name: quick}
model: {path: start}
source: {hook: "calculator:source"}
rollout: {generate: "calculator:generate"}
reward: {hook: "calculator:score"}
engines: {policy: {}}
trainer: {objective: rl, lr: 1e-4}
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
        (["rollout.generate="], ["no `rollout.generate`", "`trainer.objective: rl`"]),
        (["reward.hook="], ["no `reward.hook`"]),
        (
            ["blobs.replicas=2"],
            ["`blobs.replicas: 2` with `checkpoint.count: 1`", "raise `checkpoint.count` to 2, or lower `blobs.replicas`"],
        ),
        (["bus.replicas=3"], ["`bus.replicas: 3` without `bus.url`", "docs/external-bus.md"]),
        (["trainer.ordered=true"], ["`age.bound: 2` with `trainer.ordered: true`", "set `age.bound: 0`"]),
        (  # the next batch waits for the version that a canary refused, for ever
            ["trainer.ordered=true", "age.bound=0", "engines.policy.canary={}"],
            ["`engines.policy.canary` with `trainer.ordered: true`", "remove `engines.policy.canary`"],
        ),
        (  # an evaluation waits for one engine, and nobody else would ask for it
            [
                "engines.evals={}", "evaluation={hook: 'c:p', engines: evals}",
                "autoscale.groups.evals={least: 0, most: 2}",
            ],
            ["`autoscale.groups.evals.least: 0` with `evaluation.engines: evals`", "least: 1`"],
        ),
        (["autoscale.groups.reward={most: 2}"], ["one of rollout, policy"]),
        (
            ["rollout.routing={breaker_base_s: 10, breaker_max_s: 1}"],
            ["`rollout.routing.breaker_max_s: 1` with `breaker_base_s: 10`", "raise `rollout.routing.breaker_max_s`"],
        ),
        *(  # their engines would have the names of other actors, or never be started
            ([f"engines.{name}={{model: judge}}"], [f"`engines.{name}`", "a name that no other actor has", f"{name}-engines"])
            for name in ("rollout", "engine", "router-policy", "trainer-solver", "policy-0-node")
        ),
        (
            [
                "engines.policy.servers=[{role: prefill, count: 2}, {role: decode, count: 3}]",
                "autoscale.groups.policy={most: 9}",
            ],
            ["`autoscale.groups.policy.least: 1` with `engines.policy.servers`", "at least 3", "least: 3` or more"],
        ),
        (["source.group_size=1"], ["`source.group_size: 1` with `trainer.algorithm.advantage: grpo`"]),
        (
            ["trainer.algorithm.correction=none"],
            ["`trainer.algorithm.correction: none` with `age.bound: 2`", "correction: tis`, or `age.bound: 0`"],
        ),
        (
            ["trainer.algorithm.correction=none", "age.bound=0", "age.consumption=train"],
            ["`age.consumption: train`", "correction: tis`, or `age.consumption: mask`"],
        ),
        (
            ["trainer.algorithm.correction=none", "age.bound=0", "age.streams.main.bound=1"],
            ["`age.streams.main.bound: 1`", "or `age.streams.main.bound: 0`"],
        ),
        (
            ["trainer.publish_every=4"],
            ["`trainer.publish_every: 4` with `age.bound: 2`", "set `trainer.publish_every: 3` or less"],
        ),
        (
            ["age.in_flight=abort"],
            ["`age.in_flight: abort` with `age.consumption: mask`", "set `age.consumption: drop`"],
        ),
        (
            ["age.consumption=wait", "age.admission=free"],
            ["`age.consumption: wait` with `age.admission: free`", "set `age.admission: count`"],
        ),
        (
            ["age.streams.main.consumption=wait", "age.streams.main.admission=free"],
            ["`age.streams.main.consumption: wait` with `age.streams.main.admission: free`"],
        ),
        (["age.streams.other.bound=1"], ["`age.streams.other` with `source.name: main`", "rename it to `main`"]),
        (
            ["trainer.record_only=true", "age.admission=pace"],
            ["`trainer.record_only: true` with `age.admission: pace`", "set `age.admission: free`"],
        ),
        (
            ["trainer.algorithm.old_logprobs=engine"],
            ["`trainer.algorithm.correction: tis` with `trainer.algorithm.old_logprobs: engine`"],
        ),
        (
            ["trainer.algorithm.old_logprobs=engine", "trainer.algorithm.correction=[{kind: mis}]"],
            ["`trainer.algorithm.correction: mis` with `trainer.algorithm.old_logprobs: engine`"],
        ),
        (
            ["trainer.algorithm.kl={coef: 0.1, place: reward}"],
            ["`trainer.algorithm.kl.place: reward` with `trainer.algorithm.advantage: grpo`", "advantage: reinforce++`"],
        ),
        (
            ["trainer.algorithm.kl={coef: 0.1, kind: k1}"],
            ["`trainer.algorithm.kl.kind: k1` with `trainer.algorithm.kl.place: loss`"],
        ),
        (
            ["trainer.algorithm.kl={coef: 0.1, kind: unbiased, place: reward}", "trainer.algorithm.advantage=gae"],
            ["`trainer.algorithm.kl.kind: unbiased` with `trainer.algorithm.kl.place: reward`"],
        ),
        (
            ["trainer.algorithm={advantage: gae, whiten: true}", "source.group_size=1", "trainer.groups_per_batch=1"],
            ["`trainer.algorithm.whiten: true` with `source.group_size: 1`", "raise `trainer.groups_per_batch`"],
        ),
        (["trainer.objective=dpo", "source.group_size=1"], ["`source.group_size: 1` with `trainer.objective: dpo`"]),
        (
            ["trainer.algorithm.advantage=distillation"],
            ["`trainer.algorithm.advantage: distillation` without `trainer.algorithm.teachers`"],
        ),
        (
            ["trainer.algorithm.teachers={t: {model: t}}"],
            ["`trainer.algorithm.teachers` with `trainer.algorithm.advantage: grpo`"],
        ),
        (
            ["trainer.algorithm.reduction=constant"],
            ["`trainer.algorithm.reduction: constant` without `trainer.algorithm.constant_tokens`"],
        ),
        (
            ["trainer.algorithm.minibatches=64"],
            ["`trainer.algorithm.minibatches: 64` with `trainer.groups_per_batch: 16`"],
        ),
        (
            ["trainer.algorithm.replay={routing: R2}"],
            ["`trainer.algorithm.replay.routing: R2` with `trainer.algorithm.minibatches: 1`"],
        ),
        (
            ["trainer.algorithm.replay={nucleus: true}"],
            ["`trainer.algorithm.replay.nucleus: true` with `rollout.sampling.top_p: 1.0`", "rollout.sampling.top_k: -1"],
        ),
        (
            ["trainer.algorithm.correction=[tis, icepop]"],
            ["corrections `tis` and `icepop` together", "each weighs by the same ratio"],
        ),
        (["trainer.algorithm.correction=[opsm, opsm]"], ["corrections `opsm` and `opsm` together"]),
        (
            ["trainer.algorithm.reference={update_every: 2}"],
            ["`trainer.algorithm.reference` with `trainer.algorithm.kl.coef: 0`"],
        ),
        (
            ["trainer.algorithm.critic={lr: 0.1}"],
            ["`trainer.algorithm.critic` with `trainer.algorithm.advantage: grpo`", "advantage: gae`"],
        ),
        (["trainer.algorithm.reward_weight=0.5"], ["`trainer.algorithm.reward_weight: 0.5` with"]),
        (
            ["trainer.algorithm={advantage: turns, shaping: {scale: 2.0}}"],
            ["`trainer.algorithm.shaping` with `trainer.algorithm.advantage: turns`"],
        ),
        (["trainer.algorithm.hook_args={a: 1}"], ["`trainer.algorithm.hook_args` with `trainer.algorithm.advantage: grpo`"]),
        (["trainer.ranks=3", "trainer.tp=2"], ["`trainer.ranks: 3` with `tp * pp * cp` = 2 * 1 * 1 = 2", "multiple of 2"]),
        (
            ["trainer.ranks=6", "trainer.pp=2", "trainer.ep=2"],
            ["`ep * etp` = 2 * 1 with `trainer.ranks / trainer.pp` = 3", "multiple of 4"],
        ),
        (["trainer.ranks=4", "trainer.tp=4", "trainer.etp=2"], ["`trainer.etp: 2` with `trainer.tp: 4`", "set it to 1"]),
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
        (["--sglang-port", "30000"], ["`engines.policy.sglang.port`", "a free port is reserved at start"]),
        (
            ["engines.policy.model=.", "--sglang-checkpoint-engine-wait-weights-before-ready"],
            ["`engines.policy.model`", "would wait for ever"],
        ),
        (["--sglang-weight_version", "x"], ["`engines.policy.sglang.weight-version`", "by which tokens are accounted"]),
        (
            ["engines.policy.url=[http://h:1]", "--sglang-port", "30000"],
            ["`engines.policy.sglang` with `engines.policy.url`", "start the server with it yourself"],
        ),
        (["engines.policy.count=2", "engines.policy.gpus=3"], ["3 devices (`engines.policy.gpus`) for 2 instances"]),
        (
            ["trainer.gpus=1", "trainer.env={CUDA_VISIBLE_DEVICES: 0}"],
            ["`trainer.env.CUDA_VISIBLE_DEVICES` with `trainer.gpus`"],
        ),
        (  # every actor would be gone, and its work given to others, before each of its heartbeats
            ["supervisor.heartbeat_s=12", "supervisor.heartbeat_limit_s=60"],
            ["`supervisor.heartbeat_s: 12.0`", "expected at most 5.0", "gone"],
        ),
        (["supervisor.heartbeat_s=10"], ["`supervisor.heartbeat_limit_s: 10.0` with `supervisor.heartbeat_s: 10"]),
        (
            ["engines.policy.router=http://h:1", "engines.policy.pause=in_place"],
            ["`engines.policy.router` with `engines.policy.pause: in_place`", "disable-radix-cache: true"],
        ),
        (["engines.policy.weights_from=mirror"], ["`engines.policy.weights_from: mirror` without `checkpoint.versions`"]),
        (
            ["engines.policy={weights_from: mirror, transport: nccl}", "checkpoint.versions.mirror=s3://b/c"],
            ["`engines.policy.weights_from: mirror` with `engines.policy.transport: nccl`"],
        ),
        (["groups.enough=99"], ["`groups.enough: 99` with `source.group_size: "]),
        (["groups.enough=2", "groups.min_members=3"], ["`groups.enough: 2` with `groups.min_members: 3`"]),
        (
            ["groups.enough=2", "age.consumption=wait"],
            ["`groups.enough: 2` with `age.consumption: wait`", "do not depend on who is first"],
        ),
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
        ["age.in_flight=abort", "age.consumption=drop"],
        ["trainer.publish_every=3"],
        ["trainer.publish_every=9", "age.consumption=train"],
        ["age.consumption=wait", "age.admission=pace"],
        ["age.bound=4", "age.streams.main={bound: 0, admission: pace, consumption: drop, in_flight: abort}"],
        ["trainer.algorithm.correction=none", "trainer.algorithm.old_logprobs=engine"],
        ["trainer.ranks=4", "trainer.tp=2", "trainer.pp=2"],
        ["trainer.ranks=8", "trainer.groups_per_batch=1"],
        ["trainer.tokens_per_microbatch=257"],
        ["--sglang-context-length", "8192"],
        ["engines.judge={model: judge, sglang: {context-length: 100000}}"],
        ["engines.policy.gpus=[2, 3]", "engines.policy.count=2"],
        ["engines.policy.weights_from=mirror", "checkpoint.versions.mirror=s3://bucket/prefix"],
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


def test_the_longest_interval_of_heartbeats_leaves_room_for_one_that_is_late() -> None:
    assert 2 * LONGEST_HEARTBEAT_S <= EXPIRY_S
