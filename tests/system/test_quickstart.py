"""The quick start, smaller, on real SGLang, real megatron-core and real JetStream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from quickstart_run import QuickstartRun
from typer.testing import CliRunner

from physarum.actors.actorctl.main import app
from physarum.actors.context import RunFolder
from physarum.actors.weights_area import weights_area
from physarum.bus.ledger import surviving_steps
from physarum.configs.loader import resolve

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

STEPS = 22
PROBLEMS = 64
BATCH = 16 * 8
BOUND = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuickstartRun]:
    started = QuickstartRun(
        tmp_path_factory.mktemp("runs"), "quickstart", f"stop.steps={STEPS}", f"evaluation.problems={PROBLEMS}"
    )
    try:
        status = started.read()
        assert status == 0, started.output[-4000:]
        yield started
    finally:
        started.end()


def test_the_reward_on_held_out_problems_rises(run: QuickstartRun) -> None:
    assert run.summary["reward_start"] < 0.35
    assert run.summary["reward_end"] > 0.6


def test_every_execution_is_accounted_for(run: QuickstartRun) -> None:
    account = run.summary["account"]
    assert account["imbalance"] == 0
    assert account["double_trained"] == 0
    assert account["trained"] + account["masked"] + account["dropped"] == STEPS * BATCH
    assert account["dead"] == 0
    assert 0 <= account["in_flight"] <= (BOUND + 1) * BATCH


def test_training_is_asynchronous(run: QuickstartRun) -> None:
    """Engines generate while the trainer trains, and tokens of older versions are trained within the bound."""
    assert run.summary["overlap_share"] >= 0.5
    assert 1 <= run.summary["max_trained_age"] <= BOUND
    assert run.summary["multi_version_samples"] > 0


def test_every_step_became_a_version(run: QuickstartRun) -> None:
    assert run.summary["steps"] == STEPS
    assert 20 <= run.summary["versions"] <= STEPS + 1
    assert run.summary["pause_p50_s"] > 0


def test_the_engine_ended_at_the_last_version_and_the_memory_was_given_back(run: QuickstartRun) -> None:
    shown = CliRunner().invoke(app, ["weights", "ls", run.folder.name, "--root", str(run.folder.parent), "--json"])
    found = json.loads(shown.stdout)
    [engine] = found["engines"]
    assert (engine["label"], engine["state"]) == (found["head"], "live")
    assert {one["where"] for one in found["versions"]} == {"gone"}
    config = resolve(run.folder / "config.yaml")
    assert not weights_area(RunFolder(run.folder), config, only_look=True).folder.exists()


def test_the_trained_model_is_a_folder_that_transformers_loads(run: QuickstartRun) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(run.summary["model_dir"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("<|im_start|>user\n123+456=<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt").input_ids
    with torch.no_grad():
        made = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(made).startswith("<tool_call>123+456</tool_call>")


def test_engine_and_trainer_agree_on_the_first_batch(run: QuickstartRun) -> None:
    """The first step's tokens are all of the start version: log-probabilities agree to 1e-3."""
    first = surviving_steps(run.ledger())[0]
    assert first.ages == {0: first.tokens_trained}
    assert 0 < first.metrics["max_logprob_diff"] < 1e-3


def test_wait_and_training_time_are_shares_of_the_same_time(run: QuickstartRun) -> None:
    assert 0 <= run.summary["trainer_wait_share"] <= 1
    assert run.summary["seconds"] > 0
