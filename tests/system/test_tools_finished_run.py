"""What the tools say of, and make from, a finished run: a small data set that ends before its steps do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load
from tools_run import Runs

from physarum.weightsync.quantisation.plan import Quantisation
from physarum.weightsync.quantisation.presets import PRESETS
from physarum.weightsync.quantisation.reading import Dequantised, folder_tensors

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("tools"))
    try:
        done = made.up("up", "small.yaml", "--json")
        assert done.returncode == 0, done.stderr[-4000:]
        yield made
    finally:
        made.end()


def weights(runs: Runs, name: str) -> bytes:
    return (runs.folder / "runs" / name / "model" / "model.safetensors").read_bytes()


def test_a_small_data_set_with_many_steps_ends_with_a_smaller_last_batch(runs: Runs) -> None:
    summary = json.loads((runs.folder / "runs" / "small" / "summary.json").read_text())
    account = summary["account"]
    assert summary["steps"] == 3
    assert (account["issued"], account["trained"], account["in_flight"], account["imbalance"]) == (10, 10, 0, 0)
    [step] = runs.json("ledger", "small", "--step", "3")["steps"]
    assert [one["task"] for one in step["executions"]] == ["demos/0/8/0", "demos/0/9/0"]
    assert "the source is exhausted (source.epochs = 1)" in runs.actorctl("logs", "small", "trainer-0").stdout


def test_a_step_names_its_executions_also_after_their_samples_were_trimmed(runs: Runs) -> None:
    [step] = runs.json("ledger", "small", "--step", "1")["steps"]
    assert [one["sequence"] for one in step["executions"]] == [1, 2, 3, 4]
    assert all(one["execution"].startswith(one["task"]) for one in step["executions"])
    assert (step["changed"], step["void"], step["provisional"], step["trimmed"]) == (True, False, False, 0)
    assert step["tokens_trained"] == sum(one["trained_tokens"] for one in step["executions"])
    text = runs.actorctl("ledger", "small", "--step", "1").stdout
    assert "step 1 (epoch 1, plan 2): reward -" in text
    missing = runs.actorctl("ledger", "small", "--step", "9")
    assert (missing.returncode, missing.stdout) == (5, "")
    assert "has no step 9; it has steps 1 to 3" in missing.stderr


def test_a_sample_is_found_by_its_task_and_by_its_execution(runs: Runs) -> None:
    found = runs.json("ledger", "small", "--sample", "demos/0/5/0")
    assert (found["state"], found["where"]) == ("trained", "step 2")
    [use] = found["uses"]
    [copy] = found["copies"]
    assert (use["step"], use["void"], copy["sequence"]) == (2, False, use["sequence"])
    assert runs.json("ledger", "small", "--sample", copy["execution"])["task"] == "demos/0/5/0"
    refusals = {"demos/7/0/0": "not issued yet", "other/0/0/0": "no source 'other'", "nonsense": "expected the id"}
    for wrong, reason in refusals.items():
        refused = runs.actorctl("ledger", "small", "--sample", wrong)
        assert refused.returncode == 5
        assert reason in refused.stderr


def test_a_version_says_which_step_made_it(runs: Runs) -> None:
    [step] = runs.json("ledger", "small", "--step", "2")["steps"]
    assert runs.json("ledger", "small", "--version", "policy@1.2")["made_by"] == step["plan"]
    assert runs.json("ledger", "small", "--version", "policy@1.0")["made_by"] is None
    assert runs.actorctl("ledger", "small", "--version", "policy@1.9").returncode == 5
    assert runs.actorctl("ledger", "small", "--version", "newest").returncode == 5


def test_checkpoints_are_listed_verified_and_a_damaged_one_is_named(runs: Runs) -> None:
    listed = runs.json("checkpoints", "ls", "small")["checkpoints"]
    assert [(one["name"], one["on_disk"]) for one in listed] == [("1.1", True), ("1.2", True), ("1.3", True)]
    whole = runs.json("checkpoints", "verify", "small")["checkpoints"]
    assert [one["fault"] for one in whole] == ["", "", ""]
    file = next((runs.folder / "runs/small/checkpoints/1.2").glob("*.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        damaged = runs.actorctl("checkpoints", "verify", "small")
    finally:
        file.write_bytes(data)
    assert damaged.returncode == 1
    assert f"checkpoint file {file} has digest" in damaged.stderr
    assert runs.actorctl("checkpoints", "verify", "small", "1.9").returncode == 5
    for without in (["verify", "small", "--mirror"], ["restore", "small"], ["mirror", "small"]):
        refused = runs.actorctl("checkpoints", *without)
        assert refused.returncode == 2 and "run small has no mirror" in refused.stderr
    save = runs.actorctl("checkpoints", "save", "small")
    assert save.returncode == 2
    assert "no trainer at work" in save.stderr


@pytest.mark.slow
def test_a_checkpoint_is_exported_as_the_trainer_exports_it(runs: Runs) -> None:
    assert runs.json("checkpoints", "export-hf", "small", "plain")["checkpoint"] == "1.3"
    assert (runs.folder / "plain" / "model.safetensors").read_bytes() == weights(runs, "small")
    assert runs.json("checkpoints", "export-hf", "small", "last8", "--quant", "fp8")["checkpoint"] == "1.3"
    stored = dict(folder_tensors(runs.folder / "last8"))
    reader = Dequantised(Quantisation.in_folder(runs.folder / "last8"), stored.keys(), stored.__getitem__)
    for name, exact in folder_tensors(runs.folder / "plain"):
        assert float((reader.weight(name) - exact).abs().max()) <= float(exact.abs().max()) / 16


def test_a_start_model_is_exported_in_the_form_that_engines_hold(runs: Runs) -> None:
    for quant, method in {"fp8": "fp8", "int4": "compressed-tensors"}.items():
        made = runs.json("checkpoints", "export-hf", "small", quant, "--quant", quant, "--checkpoint", "start")
        assert (made["checkpoint"], made["quantised"]) == ("start", method)
        plan = Quantisation.in_folder(runs.folder / quant)
        assert plan is not None and plan.options == PRESETS[quant]
        assert made["size_bytes"] < len(weights(runs, "small")) / 2
    refused = runs.actorctl("checkpoints", "export-hf", "small", "fp8")
    assert refused.returncode == 2 and "fp8 exists; expected a new folder" in refused.stderr
    missing = runs.actorctl("checkpoints", "export-hf", "small", "other", "--checkpoint", "7.7")
    assert missing.returncode == 5 and "on disk are: 1.1, 1.2, 1.3" in missing.stderr
    assert not (runs.folder / "other").exists()


def test_versions_are_exported_at_their_cadence(runs: Runs) -> None:
    made = sorted(path.name for path in (runs.folder / "runs/small/exports").iterdir())
    assert made == ["policy@1.2"]
    assert (runs.folder / "runs/small/exports/policy@1.2/config.json").is_file()


def test_the_archive_has_what_was_trimmed_and_ranges_that_never_were_are_named(runs: Runs) -> None:
    made = runs.json("export", "small", "all.msgpack")
    assert (made["executions"], made["missing"]) == (10, [])
    assert runs.json("export", "small", "part.jsonl", "--from", "3", "--to", "6")["executions"] == 4
    refused = runs.actorctl("export", "small", "more.jsonl", "--from", "9", "--to", "20")
    assert refused.returncode == 1
    assert "samples 11 to 20 of 9 to 20" in refused.stderr
    assert not (runs.folder / "more.jsonl").exists()
    assert runs.actorctl("export", "small", "samples.parquet").returncode == 2


def test_an_imported_run_gives_the_same_export(runs: Runs) -> None:
    for form in ("msgpack", "jsonl"):
        runs.json("export", "small", f"out.{form}")
        fed = runs.json("import", f"out.{form}", "--run", f"in-{form}")["fed"]
        assert (fed["executions"], fed["groups"], fed["alone"]) == (10, 10, 0)
        account = runs.json("ledger", f"in-{form}")
        assert (account["issued"], account["in_flight"], account["imbalance"]) == (10, 10, 0)
        runs.json("export", f"in-{form}", f"again-{form}.jsonl")
    assert _bodies(runs.folder / "again-msgpack.jsonl") == _bodies(runs.folder / "again-jsonl.jsonl")
    taken = runs.actorctl("import", "out.jsonl", "--run", "in-jsonl")
    assert taken.returncode == 2
    assert "in-jsonl exists" in taken.stderr


def test_bad_lines_are_named_and_nothing_is_imported(runs: Runs) -> None:
    runs.json("export", "small", "good.jsonl")
    lines = (runs.folder / "good.jsonl").read_text().splitlines()
    (runs.folder / "bad.jsonl").write_text("\n".join([*lines[:2], "{", *lines[3:]]))
    refused = runs.actorctl("import", "bad.jsonl", "--run", "half")
    assert refused.returncode == 2
    assert "line 3: " in refused.stderr
    assert not (runs.folder / "runs" / "half").exists()
    assert runs.json("import", "bad.jsonl", "--run", "half", "--skip-bad")["fed"]["executions"] == 9
    into_finished = runs.actorctl("import", "good.jsonl", "small")
    assert into_finished.returncode == 2
    assert "is finished" in into_finished.stderr


@pytest.mark.slow
def test_a_replay_is_bit_equal_with_the_same_trainer_and_takes_another_ones_settings(runs: Runs) -> None:
    done = runs.up("replay", "small", "--run", "same", "--json")
    same = json.loads(done.stdout)
    assert (same["steps"], same["account"]["trained"], same["account"]["imbalance"]) == (3, 10, 0)
    assert weights(runs, "same") == weights(runs, "small")
    (runs.folder / "other.yaml").write_text("trainer: {lr: 0.005, groups_per_batch: 2}\n")
    made = runs.json("replay", "small", "--trainer", "other.yaml", "--run", "other", "--from", "5", "--no-start")
    assert (made["parent"], made["fed"]["executions"]) == ("small", 6)
    recorded = yaml.safe_load((runs.folder / "runs/other/config.yaml").read_text())
    assert (recorded["trainer"]["lr"], recorded["trainer"]["groups_per_batch"], recorded["engines"]) == (0.005, 2, {})
    lineage = json.loads((runs.folder / "runs/other/lineage.json").read_text())
    assert (lineage["kind"], lineage["parent"], lineage["facts"]["first"]) == ("replay", "small", 5)


@pytest.fixture(scope="module")
def mirror(runs: Runs) -> Path:
    """Holds the checkpoints of the run `forked`, which is at its end; it began with none on disk."""
    mirror = runs.folder / "mirror"
    settings = (
        *("trainer.lr=0.002", f"checkpoint.mirror=file://{mirror}", "checkpoint.mirror_keep=2"),
        f"checkpoint.versions={{mirror: 'file://{mirror}-versions', every: 50}}",
    )
    made = runs.json("fork", "small", "--at-step", "1", "--run", "forked", *settings)
    assert (made["samples"], made["checkpoint"], made["epoch"]) == (6, "1.1", 1)
    _only_in_the_mirror(runs, "forked", mirror)
    done = runs.up("up", "runs/forked/config.yaml", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    return mirror


def _only_in_the_mirror(runs: Runs, name: str, mirror: Path) -> None:
    """Its one checkpoint: the trainer starts where the disk of its checkpoints was lost."""
    [one] = [one for one in runs.json("checkpoints", "ls", name)["checkpoints"] if one["on_disk"]]
    assert one["mirrored"] is False
    (mirror / name).mkdir(parents=True)
    shutil.move(
        runs.folder / "runs" / name / "checkpoints" / one["name"], mirror / name / f"{one['name']}-{one['digest']}"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("mirror")
def test_a_fork_goes_on_from_its_checkpoint_with_the_log_from_there(runs: Runs) -> None:
    account = runs.json("ledger", "forked")
    assert (account["issued"], account["trained"], account["imbalance"], account["double_trained"]) == (10, 10, 0, 0)
    [step] = runs.json("ledger", "forked", "--step", "2")["steps"]
    assert (step["epoch"], [one["sequence"] for one in step["executions"]]) == (2, [5, 6, 7, 8])
    assert step["metrics"]["lr"] == 0.002
    refused = runs.actorctl("fork", "small", "--at-step", "7", "--run", "nothing")
    assert refused.returncode == 5
    assert "there are those of steps 1, 2, 3" in refused.stderr
    assert not (runs.folder / "runs" / "nothing").exists()
    assert "was brought back from file://" in runs.actorctl("logs", "forked", "trainer-0").stdout


@pytest.mark.slow
def test_a_checkpoint_comes_back_from_the_mirror_and_a_damaged_one_never_does(runs: Runs, mirror: Path) -> None:
    """The newest is there; which others are is a matter of pace."""
    there = {one["name"]: one["mirrored"] for one in runs.json("checkpoints", "ls", "forked")["checkpoints"]}
    assert list(there) == ["1.1", "2.2", "2.3"] and there["2.3"]
    assert len(list((mirror / "forked").iterdir())) == sum(there.values()) <= 2  # checkpoint.mirror_keep
    assert runs.json("checkpoints", "mirror", "forked")["sent_bytes"] == 0
    for name in ("1.1", "2.2"):
        assert (runs.json("checkpoints", "mirror", "forked", name)["sent_bytes"] > 0) is not there[name]
    verified = runs.json("checkpoints", "verify", "forked", "--mirror")["checkpoints"]
    assert [(one["name"], one["fault"]) for one in verified] == [("1.1", ""), ("2.2", ""), ("2.3", "")]
    shutil.rmtree(runs.folder / "runs/forked/checkpoints/2.2")
    brought = runs.json("checkpoints", "restore", "forked", "2.2")
    assert brought["brought_bytes"] > 0 and brought["checkpoint"]["on_disk"]
    assert runs.json("checkpoints", "restore", "forked")["brought_bytes"] == 0
    assert [one["fault"] for one in runs.json("checkpoints", "verify", "forked")["checkpoints"]] == ["", "", ""]
    file = next(mirror.glob("forked/2.3-*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    damaged = runs.actorctl("checkpoints", "verify", "forked", "2.3", "--mirror")
    assert damaged.returncode == 1 and f"{file.name} has digest" in damaged.stderr
    shutil.rmtree(runs.folder / "runs/forked/checkpoints/2.3")
    assert runs.actorctl("checkpoints", "restore", "forked").returncode == 1
    assert runs.actorctl("checkpoints", "restore", "forked", "9.9").returncode == 5
    assert not list((runs.folder / "runs/forked/checkpoints").glob(".*"))


@pytest.mark.slow
def test_the_last_version_of_a_run_is_in_the_store_and_is_its_model(runs: Runs, mirror: Path) -> None:
    """Whatever `every` leaves out: the run drains only when it is there."""
    pulled = runs.json("weights", "pull", f"file://{mirror}-versions", "pulled", "--run", "forked")
    assert pulled["label"] == "policy@2.3"
    assert runs.json("weights", "ls", "forked")["mirrored"] == "policy@2.3"
    found = load((runs.folder / "pulled" / "current" / "model.safetensors").read_bytes())
    model = load(weights(runs, "forked"))
    assert found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)


def test_recording_without_training_keeps_every_sample_for_a_replay(runs: Runs) -> None:
    done = runs.up("rollout-only", "small.yaml", "run.name=rec", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    account = summary["account"]
    assert (summary["steps"], account["issued"], account["in_flight"], account["imbalance"]) == (0, 10, 10, 0)
    assert summary["model_dir"].endswith("model")
    made = runs.json("replay", "rec", "--no-start")
    assert (made["run"], made["fed"]["executions"]) == ("rec-replay", 10)
    recorded = yaml.safe_load((runs.folder / "runs/rec-replay/config.yaml").read_text())
    assert (recorded["trainer"]["record_only"], recorded["age"]["consumption"]) == (False, "train")


def test_a_run_without_dead_letters_says_so(runs: Runs) -> None:
    assert runs.json("dead", "ls", "small") == {"letters": []}
    assert runs.actorctl("dead", "show", "small", "1").returncode == 5
    assert runs.actorctl("dead", "retry", "small").returncode == 2


def _bodies(path: Path) -> list[object]:
    """Executions without what names the run that they are in."""
    rows = [json.loads(line)["execution"] for line in path.read_text().splitlines()[1:]]
    return [{**row, "task": {**row["task"], "run": ""}} for row in rows]


@pytest.mark.slow
def test_a_fork_goes_on_in_another_shape_from_a_checkpoint_in_torch_dist(runs: Runs) -> None:
    """Two ranks and a sharded optimizer end where the one rank of `small` ended; a damaged file is named before."""
    runs.json("fork", "small", "--at-step", "1", "--run", "alone", "trainer.checkpoint_format=torch_dist")
    assert runs.up("up", "runs/alone/config.yaml", "--json").returncode == 0
    assert weights(runs, "alone") == weights(runs, "small")
    listed = runs.json("checkpoints", "ls", "alone")["checkpoints"]
    assert [one["form"] for one in listed] == ["ranks", "torch_dist", "torch_dist"]
    file = next((runs.folder / "runs/alone/checkpoints").glob("*.2/.metadata"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"checkpoint file {file} has digest" in runs.actorctl("checkpoints", "verify", "alone").stderr
    file.write_bytes(whole)
    settings = ("trainer.ranks=2", "trainer.megatron.use_distributed_optimizer=true")
    runs.json("fork", "alone", "--at-step", "2", "--run", "two", *settings)
    done = runs.up("up", "runs/two/config.yaml", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    expected, found = (load(weights(runs, name)) for name in ("small", "two"))
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-5) for name in expected)
