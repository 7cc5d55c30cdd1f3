"""A whole run on three real engines, of which one is killed, one drains and one joins while episodes run.

Real SGLang, Megatron-core and JetStream, `actorctl` as a user calls it, one try for each task. Every version is exported, so
transformers can say of every token whether the weights that its span names made it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from quickstart_run import ROOT

from physarum.actors.context import RunFolder
from physarum.bus.records import Sample
from physarum.bus.version import Version
from tests.bench.whole_runs import recorded

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]

HOOKS = ROOT / "tests" / "bench" / "long_tail_hooks.py"
LIMIT_S = 400.0
VOCABULARY = 64
SLOTS = 24
TOLERANCE = 1e-3
CHECKED = 120
"""Samples that transformers computes again, those of most versions among them."""


def configuration(name: str) -> dict[str, Any]:
    """Answers of 8 to 300 tokens; a step changes the weights by enough that each version's log-probabilities differ."""
    lengths = {"vocabulary": VOCABULARY, "median": 80, "sigma": 0.8, "most": 300, "group": 4}
    return {
        "run": {"name": name},
        "bus": {"max_deliver": 1},
        "model": {"factory": {"hook": "physarum.agents.calculator.model:build", "args": {"seed": 0}}},
        "source": {"name": "tail", "hook": f"{HOOKS}:LongTail", "args": lengths, "group_size": 4},
        "rollout": {"count": 2, "slots": SLOTS, "generate": f"{HOOKS}:generate"},
        "reward": {"hook": f"{HOOKS}:reward"},
        "engines": {"policy": {"count": 3, "sglang": {"context-length": 512}}},
        "trainer": {
            "objective": "rl", "lr": 2e-3, "groups_per_batch": 8, "tokens_per_microbatch": 8192, "export_every": 1,
        },
        "checkpoint": {"keep_exports": None},
        "samples": {"keep": "all"},
        "age": {"bound": 4},
        "groups": {"refills": 0},
        "stop": {"steps": 1_000_000},
    }  # fmt: skip


class FleetRun:
    """The run, its supervisor's process and what `actorctl` says of it."""

    def __init__(self, place: Path) -> None:
        self.place, self.folder = place, place / "runs" / "fleet"
        (place / "fleet.yaml").write_text(yaml.safe_dump(configuration("fleet")))

    def actorctl(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "physarum.actors.actorctl", *arguments],
            cwd=self.place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.actorctl(*arguments, "--json"))

    def counts(self, *names: str) -> list[float]:
        """Numbers of the rollout actors at one moment, summed."""
        rollouts = [one["numbers"] for one in self.json("ps", "fleet")["actors"] if one["role"] == "rollout"]
        return [sum(numbers.get(name, 0) for numbers in rollouts) for name in names]

    def until(self, what: str, found: Callable[[], Any]) -> Any:
        """What `found` gives once it gives something: facts of other processes, which only a command tells."""
        limit = time.monotonic() + LIMIT_S
        while not (value := found()):
            assert time.monotonic() < limit, f"{what} did not happen"
            time.sleep(0.5)
        return value

    def engines_at_work(self) -> dict[str, int]:
        """The actor's pid of each engine that is ready and has requests."""
        actors = [one for one in self.json("ps", "fleet")["actors"] if one["role"] == "engine"]
        ready = [one for one in actors if one["state"] == "ready" and one["numbers"].get("running", 0) > 0]
        return {one["instance"]: int(one["pid"]) for one in ready}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FleetRun]:
    made = FleetRun(tmp_path)
    try:
        made.actorctl("up", "--detach", "fleet.yaml")
        yield made
    finally:
        made.actorctl("down", "--now")


async def test_no_episode_notices_that_an_engine_is_killed_one_drains_and_one_joins(run: FleetRun) -> None:
    first = run.until("three engines at work", lambda: len(found := run.engines_at_work()) == 3 and found)
    kill_server(first["policy-0"])
    run.actorctl("drain", "fleet", "policy-1")
    run.actorctl("scale", "fleet", "policy=+1")
    run.until("the engines that came work", lambda: stayed(first, run.engines_at_work()) == ["policy-2"])
    interrupted, replayed = run.counts("interrupted", "replayed")
    assert interrupted >= replayed > 0
    run.actorctl("down", "fleet")

    account = run.json("ledger", "fleet")
    assert (account["imbalance"], account["double_trained"], account["dead"]) == (0, 0, 0)
    samples, steps = await recorded(run.folder)
    assert len(steps) > 2
    check_spans(run.folder, samples)


def stayed(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Who is the same process as before, once as many are at work (the lowest free number joins); else nobody."""
    return [name for name, pid in now.items() if before[name] == pid] if now.keys() == before.keys() else []


def kill_server(actor: int) -> None:
    """SIGKILL for every process below the engine's actor, the guardian included: nobody says goodbye."""
    for process in psutil.Process(actor).children(recursive=True):
        process.send_signal(signal.SIGKILL)


def check_spans(folder: Path, samples: list[Sample]) -> None:
    """Each token's log-probability is that of its version's weights, and another version's is not."""
    several = sorted(samples, key=lambda one: -len(one.spans))
    assert len(several[0].spans) > 1, "some episode saw more than one version"
    chosen = several[: CHECKED // 2] + random.Random(0).sample(several, min(CHECKED // 2, len(several)))
    labels = sorted({span.version for one in chosen for span in one.spans}, key=lambda label: Version.parse(label))
    models = {label: load(folder, label) for label in labels}
    wrong = Counter[bool]()
    for one in chosen:
        for span in one.spans:
            given = one.logprobs[span.start : span.end]
            apart = {
                label: float(np.abs(logprobs(models[label], one)[span.start : span.end] - given).max())
                for label in (span.version, neighbour(labels, span.version))
            }
            assert apart.pop(span.version) < TOLERANCE, span
            wrong.update(value > TOLERANCE for value in apart.values())
    assert wrong[True] > 10 * wrong[False], "a neighbour's weights can be told apart"


def neighbour(labels: list[str], label: str) -> str:
    at = labels.index(label)
    return labels[at - 1 if at else 1]


def load(folder: Path, label: str) -> Any:
    from transformers import AutoModelForCausalLM

    place, start = RunFolder(folder), Version.parse(label).number == 0
    return AutoModelForCausalLM.from_pretrained(place.start_model if start else place.exports / label).eval()


def logprobs(model: Any, sample: Sample) -> np.ndarray[Any, Any]:
    """Of each response token [R]."""
    import torch

    tokens = torch.from_numpy(np.array(sample.token_ids, np.int64))
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    chosen = torch.log_softmax(logits.double(), -1).gather(-1, tokens[1:, None])[:, 0]
    return np.asarray(chosen[sample.prompt_len - 1 :].numpy())
