"""`check` finds before the start what would fail after it."""

from __future__ import annotations

import codecs
import json
import re
import socket
from collections import namedtuple
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import save_file

from physarum.actors import preflight
from physarum.configs.checks import check, host
from physarum.configs.data_files import expand_data, inspect_file
from physarum.configs.errors import ConfigError, Problem, Severity, errors_in
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.weightsync.quantisation.presets import preset

HOOKS = """\
class Rows:
    def __init__(self, seed, size=3): self.size = size
    def row(self, epoch, index): return {"prompt": "1+1="}
    def __len__(self): return self.size
async def generate(task, client, *, turns=2): return []
def score(execution): return 1.0
def plain(task, client): return []
"""
RECIPE = """\
run: {name: quick, root: ROOT}
model: {path: ./start}
source: {hook: "./hooks.py:Rows", args: {size: 4}}
rollout: {generate: "./hooks.py:generate", args: {turns: 3}}
reward: {hook: "./hooks.py:score"}
engines: {policy: {}}
trainer: {objective: rl, lr: 1e-4}
stop: {steps: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    start = tmp_path / "start"
    start.mkdir()
    for name, text in {"config.json": "{}", "model.safetensors": "", "tokenizer.json": "{}"}.items():
        (start / name).write_text(text)
    (tmp_path / "hooks.py").write_text(HOOKS)
    path = tmp_path / "c.yaml"
    path.write_text(RECIPE.replace("ROOT", str(tmp_path / "runs")))
    return path


def problems(recipe: Path, *words: str) -> list[Problem]:
    found = check(resolve(recipe, parse_command_line(words)))
    return [problem for problem in found if "MiB free" not in problem.found]  # the host's disk is not under test


def only(recipe: Path, *words: str) -> str:
    found = problems(recipe, *words)
    assert len(found) == 1, [str(problem) for problem in found]
    assert found[0].severity is Severity.ERROR
    return str(found[0])


def test_a_sound_run_has_no_problem(recipe: Path) -> None:
    assert problems(recipe) == []
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        (
            "source.args={sise: 4}",
            ["hooks.py:Rows", "unexpected keyword argument 'sise'", "(seed, size=..., sise=...)"],
        ),
        ("source.hook=hooks_absent:f", ["command line: source.hook", "no module `hooks_absent`"]),
        ("rollout.args={turn: 4}", ["unexpected keyword argument 'turn'"]),
        ("rollout.generate=json:dumps", ["too many positional arguments"]),
        ("reward.hook=json:nothing", ["no `nothing` in json"]),
        ("reward.concurrency=2", ["score, which is not async", "declare it `async def`"]),
    ],
)
def test_a_hook_that_cannot_serve_is_refused(recipe: Path, word: str, parts: list[str]) -> None:
    message = only(recipe, word)
    assert all(part in message for part in parts), message


def test_a_generate_that_is_not_async_is_refused_before_the_start(recipe: Path) -> None:
    text = recipe.read_text().replace('hooks.py:generate", args: {turns: 3}', 'hooks.py:plain"')
    recipe.write_text(text)
    assert "c.yaml:4: rollout.generate: found hook" in only(recipe)
    assert "which is not async" in only(recipe)


def test_a_model_folder_names_what_it_lacks(recipe: Path) -> None:
    start = recipe.parent / "start"
    (start / "model.safetensors").unlink()
    (start / "tokenizer.json").unlink()
    (start / "config.json").write_text("{")
    text = "\n".join(str(problem) for problem in problems(recipe))
    assert "a broken config.json" in text
    assert "no model.safetensors or pytorch_model.bin or" in text
    assert "no tokenizer" in text
    assert "no folder" in only(recipe, "model.path=/nowhere/at/all")


def test_an_optimizer_to_go_on_with_must_be_there(recipe: Path) -> None:
    (found,) = problems(recipe, "trainer.optimizer_start.folder=iter_0000100")
    assert "no metadata.json in" in found.found and "iter_*" in found.remedy


def test_a_missing_shard_is_named(recipe: Path) -> None:
    start = recipe.parent / "start"
    (start / "model.safetensors").rename(start / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (start / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "found no b.safetensors in" in only(recipe)


def test_the_configuration_that_makes_the_model_is_checked(recipe: Path) -> None:
    maker = recipe.parent / "sft.yaml"
    maker.write_text("extends: c.yaml\nmodel: {path: ./none}\ntrainer: {objective: sft}\n")
    assert "sft.yaml:2: model.path: found no folder" in only(recipe, f"model.made_by={maker}")
    maker.write_text("extends: c.yaml\nmodel: {made_by: ./sft.yaml}\n")
    assert "sft.yaml -> " in only(recipe, f"model.made_by={maker}")
    maker.write_text("extends: c.yaml\nreward: {hook: 'json:nothing'}\n")
    assert "sft.yaml:2: reward.hook: found hook json:nothing: no `nothing`" in only(recipe, f"model.made_by={maker}")
    maker.write_text("extends: c.yaml\ntrainer: {objective: sftt}\n")
    assert "sft.yaml:2: trainer.objective: found 'sftt'" in only(recipe, f"model.made_by={maker}")


def test_broken_lines_warn_and_only_broken_lines_refuse(recipe: Path) -> None:
    data = recipe.parent / "d.jsonl"
    data.write_text('{"prompt": "a"}\n{"prompt": \n\n[1]\n{"question": "b"}\n')
    words = [f"source.data={data}"]
    found = problems(recipe, *words)
    assert [problem.severity for problem in found] == [Severity.WARNING]
    assert "3 broken lines in" in found[0].found
    for part in ("line 2: not JSON", "line 4: not a JSON object", "line 5: no column `prompt`"):
        assert part in found[0].found
    data.write_text("nonsense\n")
    assert [problem.severity for problem in problems(recipe, *words)] == [Severity.ERROR, Severity.WARNING]
    assert "found no file" in only(recipe, f"source.data={data}x*")


@pytest.mark.parametrize("entry", ["[5:]", "[3:5]", "[-9:-5]"])
def test_a_slice_without_a_row_is_refused_before_the_start(recipe: Path, entry: str) -> None:
    data = recipe.parent / "d.jsonl"
    data.write_text('{"prompt": "a"}\n' * 3)
    assert f"d.jsonl{entry}, and 3 rows there; expected a slice that holds a row" in only(
        recipe, f"source.data={data}{entry}"
    )
    assert problems(recipe, f"source.data={data}[2:9]") == []


def test_a_column_that_was_named_and_that_no_row_has_is_told(recipe: Path) -> None:
    """Every reward that needs a label failed at its first execution."""
    data = recipe.parent / "d.jsonl"
    data.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n')
    words = [f"source.data={data}"]
    assert problems(recipe, *words, "source.columns.label=answer") == []
    (found,) = problems(recipe, *words, "source.columns.label=anwser")
    assert (found.severity, found.found) == (Severity.WARNING, "no row with the column `anwser`")
    table = recipe.parent / "d.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "extra": [{"answer": 1}]}), table)
    words = [f"source.data={table}"]
    assert problems(recipe, *words, "source.columns.label=extra.answer") == []
    (found,) = problems(recipe, *words, "source.columns.label=answer")
    assert found.found == "no row with the column `answer`"
    (found,) = problems(recipe, *words, "source.columns.label=extra.anwser")
    assert found.found == "no row with the column `extra.anwser`"
    assert problems(recipe, *words, "source.columns.metadata=extra") == []


def test_rows_that_are_named_twice_are_told(recipe: Path) -> None:
    data = recipe.parent / "d.jsonl"
    data.write_text('{"prompt": "a"}\n' * 4)
    other = recipe.parent / "other.jsonl"
    other.symlink_to(data)
    thrice = [f"{data}[:1]", f"{data}[2:3]", f"{data}[2:]"]
    for entries in ([f"{data}", f"{other}"], [f"{data}[:2]", f"{data}[1:]"], [f"{data}", f"{data}[-1:]"], thrice):
        (found,) = problems(recipe, f"source.data={json.dumps(entries)}")
        assert found.severity is Severity.WARNING and "in an entry before it" in found.found, entries
    apart = ([f"{data}[:2]", f"{data}[2:]"], [f"{data}[:-1]", f"{data}[-1:]"])
    for entries in (*apart, [f"{data}", f"{recipe.parent}/d*.jsonl"]):
        assert problems(recipe, f"source.data={json.dumps(entries)}") == []


def test_a_folder_with_brackets_in_its_name_is_a_folder(recipe: Path) -> None:
    folder = recipe.parent / "run [1]"
    folder.mkdir()
    (folder / "d.jsonl").write_bytes(codecs.BOM_UTF8 + b'{"prompt": "a"}\n')
    assert problems(recipe, f"source.data={folder}") == [], "and a mark of byte order is no part of the first row"


def test_no_set_at_all_is_refused_in_plain_words(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.sets: found \{\} \(mapping\); expected at least 1 of them"):
        problems(recipe, "evaluation={}", "evaluation.sets={}")


def test_a_large_file_is_tried_in_part_only(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "a"}\n' * 5)
    report = inspect_file(data, "prompt", max_rows=4)
    assert (report.good, report.broken, report.complete) == (4, 0, False)
    assert inspect_file(data, "prompt", max_rows=5).complete


def test_patterns_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("")
    files = expand_data([tmp_path / "b.jsonl", tmp_path / "*.jsonl"])
    assert [file.name for file in files] == ["b.jsonl", "a.jsonl"]


def test_ports_in_use_or_wanted_twice_are_refused(recipe: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert f"bus.port: found port {port}, which is in use" in only(recipe, f"bus.port={port}")
        assert problems(recipe, f"bus.port={port}", "bus.url=nats://host:4222") == []
    message = only(recipe, f"checkpoint.port={port}", f"trainer.master_port={port}")
    assert f"port {port} at `checkpoint.port` and at `trainer.master_port`" in message


def test_devices_that_are_not_there_are_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    message = only(recipe, "trainer.gpus=2")
    assert "2 devices asked for" in message
    assert "the 0 devices present (nvidia-smi is not installed)" in message


def test_unset_secrets_and_missing_files_are_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUS_SECRET", raising=False)
    assert "bus.token_env: found BUS_SECRET, which is not set" in only(recipe, "bus.token_env=BUS_SECRET")
    monkeypatch.setenv("BUS_SECRET", "x")
    assert problems(recipe, "bus.token_env=BUS_SECRET") == []
    assert "no file" in only(recipe, "bus.tls_ca=/nowhere/ca.pem")
    assert "no executable" in only(recipe, "engines.policy.python=/nowhere/python")


def test_a_run_folder_that_cannot_be_made_is_refused(recipe: Path) -> None:
    blocker = recipe.parent / "file"
    blocker.write_text("")
    assert "which cannot be written" in only(recipe, f"run.root={blocker}/runs")


@pytest.mark.parametrize(("free_mib", "severities"), [(2048, []), (512, [Severity.WARNING]), (63, [Severity.ERROR])])
def test_a_full_disk_warns_and_then_refuses(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, severities: list[Severity]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: usage(1 << 40, 0, free_mib << 20))
    found = check(resolve(recipe))
    assert [problem.severity for problem in found] == severities
    assert all(f"{free_mib} MiB free" in problem.found for problem in found)


def test_all_problems_come_at_once(recipe: Path) -> None:
    found = problems(recipe, "model.path=/none", "reward.hook=json:nothing", "bus.token_env=NOT_SET_AT_ALL")
    assert len(errors_in(found)) == 3


def quantised_folder(recipe: Path, name: str, options: object) -> Path:
    folder = recipe.parent / name
    folder.mkdir()
    texts = {
        "config.json": json.dumps({"quantization_config": options}),
        "model.safetensors": "",
        "tokenizer.json": "{}",
    }
    for file, text in texts.items():
        (folder / file).write_text(text)
    return folder


def test_a_quantised_model_must_be_quantised_in_a_way_that_versions_can_take(recipe: Path) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    good = f"engines.policy.quantised_model={quantised_folder(recipe, 'good', fp8)}"
    assert problems(recipe, good) == [] and problems(recipe, good, "engines.policy.sglang={quantization: fp8}") == []
    plain = quantised_folder(recipe, "plain", None)
    assert "no quantization_config in" in only(recipe, f"engines.policy.quantised_model={plain}")
    gptq = quantised_folder(recipe, "gptq", {"quant_method": "gptq"})
    for word in (f"engines.policy.quantised_model={gptq}", f"model.path={gptq}"):
        [found] = preflight.check(resolve(recipe, parse_command_line([word])))
        assert "has quant_method: 'gptq'; supported are fp8" in str(found)


def test_a_mirror_whose_scheme_is_not_installed_is_refused_before_the_start(recipe: Path) -> None:
    assert preflight.check(resolve(recipe, parse_command_line(["checkpoint.mirror=file:///mnt/shared/runs"]))) == []
    [found] = preflight.check(resolve(recipe, parse_command_line(["checkpoint.mirror=nowhere://bucket/runs"])))
    assert "checkpoint.mirror: found no implementation of nowhere://" in str(found)
    assert "Install the extra `objects`" in found.remedy
    words = ["checkpoint.versions={mirror: nowhere://bucket/runs, key_env: NOT_SET_KEY}"]
    secret, found = preflight.check(resolve(recipe, parse_command_line(words)))
    assert "checkpoint.versions.key_env: found NOT_SET_KEY, which is not set" in str(secret)
    assert "checkpoint.versions.mirror: found no implementation of nowhere://" in str(found)


def test_engines_that_follow_versions_have_one_form(recipe: Path) -> None:
    fp8 = quantised_folder(recipe, "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"})
    one, start = f"engines.policy.quantised_model={fp8}", recipe.parent / "start"
    assert problems(recipe, one, f"engines.other={{quantised_model: {fp8}}}") == []
    assert problems(recipe, one, f"engines.judge={{model: {start}}}") == []
    refused = {
        (one, "engines.other={}"): "`engines.other.quantised_model` other than `engines.policy.quantised_model`",
        (one, f"engines.judge={{model: {start}, quantised_model: {fp8}}}"): "follows no versions",
        ("engines.policy.sglang={quantization: fp8}",): "a model that is quantised already",
    }
    for words, reason in refused.items():
        with pytest.raises(ConfigError, match=re.escape(reason)):
            problems(recipe, *words)


def test_weights_that_sglang_loads_only_once_are_warned_of(recipe: Path) -> None:
    layer = "model.layers.0.mlp"
    names = [f"{layer}.up_proj", f"{layer}.experts.0.up_proj"]
    for method, warned in {"int4": 1, "fp8": 0}.items():
        folder = quantised_folder(recipe, method, preset(method).options)
        stored = preset(method).tensors((f"{name}.weight", torch.ones(8, 32)) for name in names)
        save_file(dict(stored), folder / "model.safetensors")
        word = f"engines.policy.quantised_model={folder}"
        found = [one for one in preflight.check(resolve(recipe, parse_command_line([word]))) if "repacks" in one.found]
        assert [(one.severity, f"1 weights in {folder}" in one.found) for one in found] == [
            (Severity.WARNING, True)
        ] * warned
