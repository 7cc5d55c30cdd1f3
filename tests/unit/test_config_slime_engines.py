"""slime's engines become `engines:` by slime's own rules; what has no counterpart is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.slime_engines import import_engines
from physarum.configs.slime_flags import parse_flags, words_of_script
from physarum.configs.yaml_file import Layer, read_yaml

PAIRS = """\
sglang:
  - name: Actor_1
    num_gpus_per_engine: 4
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2, overrides: {chunked_prefill_size: 8192}}
      - {worker_type: decode, num_gpus: 12, overrides: {mem_fraction_static: 0.88, pp_size: 2}}
      - {worker_type: placeholder, num_gpus: 2}
  - name: ref
    model_path: /ref
    update_weights: false
    engine_groups:
      - {worker_type: regular, num_gpus: 16, num_gpus_per_engine: 16}
"""


def imported(folder: Path, text: str, *flags: str) -> dict[str, Any]:
    (folder / "s.yaml").write_text(text)
    found: dict[str, Any] = import_engines(read_yaml(folder / "s.yaml"), parse_flags(flags)).values
    return found


def test_groups_of_a_model_become_parts_of_a_group(tmp_path: Path) -> None:
    flags = ("--rollout-num-gpus", "34", "--sglang-mem-fraction-static", "0.7", "--sglang-server-concurrency", "64")
    found = imported(tmp_path, PAIRS, *flags)["engines"]
    assert list(found) == ["actor-1", "ref"]
    assert found["actor-1"]["servers"] == [
        {"role": "prefill", "count": 2, "gpus": 4, "sglang": {"tp-size": 2, "chunked-prefill-size": 8192}},
        {"role": "decode", "count": 3, "gpus": 12, "sglang": {"tp-size": 2, "mem-fraction-static": 0.88, "pp-size": 2}},
        {"role": "placeholder", "gpus": 2},
    ]
    assert found["actor-1"]["sglang"] == {"mem-fraction-static": 0.7}
    assert found["ref"] == {
        "model": "/ref", "count": 1, "nodes": 2, "gpus": 16, "sglang": {"mem-fraction-static": 0.7, "tp-size": 16},
        "concurrency": {"ceiling": 64, "floor": 4},
    }  # fmt: skip


def test_what_is_not_said_of_updates_is_inferred_as_slime_does(tmp_path: Path) -> None:
    text = "sglang: [{name: a, model_path: /m, server_groups: [{worker_type: regular, num_gpus: 1}]}]"
    assert "model" not in imported(tmp_path, text, "--hf-checkpoint", "/m")["engines"]["a"]
    assert imported(tmp_path, text, "--hf-checkpoint", "/other")["engines"]["a"]["model"] == "/m"
    with pytest.raises(ConfigError, match="add `update_weights: false`, or give --hf-checkpoint"):
        imported(tmp_path, text)


def test_the_file_is_read_as_it_is_beside_a_run(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(PAIRS)
    (tmp_path / "r.yaml").write_text("""\
extends: s.yaml
run: {name: r}
model: {path: m}
source: {hook: "calculator:source"}
trainer: {objective: sft, lr: 1.0}
engines: {actor-1: {update_share: 1.0}}
stop: {steps: 1}
""")
    engines = resolve(tmp_path / "r.yaml").engines
    assert engines["actor-1"].instances == 5 and engines["actor-1"].paired and engines["actor-1"].update_share == 1.0
    assert engines["ref"].model == Path("/ref")


ONE = "sglang: [{{name: a, update_weights: true, {}}}]"
GROUP = "server_groups: [{{worker_type: regular, num_gpus: 8, {}}}]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ONE.format("server_group: []"), "did you mean `server_groups`"),
        (ONE.format(GROUP.format("num_gpus_per_engin: 2")), "did you mean `num_gpus_per_engine`"),
        (ONE.format(GROUP.format("num_gpus_per_engine: 3")), "`num_gpus: 8` with `num_gpus_per_engine: 3`"),
        (ONE.format(GROUP.format("num_gpus_per_engine: true")), "a whole number above 0"),
        (ONE.format(GROUP.format("overrides: {tp_size: 4}")), "tp_size * pp_size = num_gpus_per_engine"),
        (ONE.format(GROUP.format("overrides: {model_path: /m, port: 3}")), "write `model_path` beside `name`"),
        (ONE.format("server_groups: [{worker_type: decoder, num_gpus: 1}]"), "did you mean `decode`"),
        (ONE.format("server_groups: [{worker_type: regular}]"), "found None; expected a whole number above 0"),
        (ONE.format("server_groups: []"), "no list of groups"),
        (ONE.format(GROUP.format("") + ", engine_groups: []"), "`server_groups` and `engine_groups`"),
        ("sglan: []", "did you mean `sglang`"),
        ("sglang: {actor: {}}", "no list `sglang`"),
        ("sglang: [{server_groups: []}]", "a model without `name`"),
        (
            "sglang: [{name: a, update_weights: false, model_path: /m,"
            " server_groups: [{worker_type: prefill, num_gpus: 1}]}]",
            "who asks a frozen model asks one server",
        ),
        (
            "sglang: [{name: a, server_groups: [{worker_type: regular, num_gpus: 1}]},"
            " {name: b, server_groups: [{worker_type: regular, num_gpus: 1}]}]",
            "2 models with `update_weights`: a, b",
        ),
    ],
)
def test_what_slime_would_refuse_is_refused_with_a_remedy(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, text)
    assert words in str(caught.value)


def test_a_number_of_gpus_that_does_not_fit_names_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="34 GPUs in all groups with `--rollout-num-gpus 33`"):
        imported(tmp_path, PAIRS, "--rollout-num-gpus", "33")


SCRIPT = """\
#!/bin/bash
SGLANG_ARGS=(
   --rollout-num-gpus 16   # of all
   --rollout-num-gpus-per-engine 2
   --sglang-cuda-graph-bs 1 2 4
   --sglang-enable-dp-attention
   --sglang-chunked-prefill-size -1
   --router-policy cache_aware
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \\
   --actor-num-nodes 1 ${SGLANG_ARGS[@]} --prefill-num-servers 2
"""


def test_flags_are_found_in_the_script_that_holds_them() -> None:
    read = parse_flags(words_of_script(SCRIPT, "run.sh"))
    found, left_out = import_engines(Layer(), read)
    group: Any = found["engines"]["policy"]  # type: ignore[index, call-overload]
    assert group["sglang"] == {"cuda-graph-bs": [1, 2, 4], "enable-dp-attention": True, "chunked-prefill-size": -1}
    assert [(part["role"], part["count"], part["gpus"]) for part in group["servers"]] == [
        ("prefill", 2, 4),
        ("decode", 6, 12),
    ]
    assert left_out == ("--address", "--actor-num-nodes", "--router-policy"), "pairs are not chosen by a router here"
    alone = import_engines(Layer(), parse_flags(["--rollout-num-gpus", "2", "--router-policy", "random"]))
    assert alone.values["engines"]["policy"]["start_router"] == {"policy": "random"}  # type: ignore[index, call-overload]
    assert alone.left_out == ()


def test_engines_that_run_elsewhere_are_attached() -> None:
    words = "--rollout-external-engine-addrs h1:1 http://h2:2 --sglang-router-ip ::1 --sglang-router-request-timeout-secs 60"
    found: dict[str, Any] = import_engines(Layer(), parse_flags(words.split())).values
    assert found["engines"]["policy"] == {"url": ["http://h1:1", "http://h2:2"], "router": "http://[::1]:30000"}
    assert found["rollout"] == {"request_timeout_s": 60.0}
    with pytest.raises(ConfigError, match="start the servers with it yourself"):
        import_engines(Layer(), parse_flags([*words.split(), "--sglang-dtype", "float16"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout-num-gpus $N", "which only a shell can know"),
        ("--sglang-mem-fraction-static ${F}", "which only a shell can know"),
        ("--rollout-num-gpus many", "expected a whole number"),
        ("--rollout-num-gpus", "found nothing; expected one value"),
        ("--rollout-num-gpus-per-engin 2", "did you mean `--rollout-num-gpus-per-engine`"),
    ],
)
def test_a_flag_that_cannot_be_read_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(words.split())
    assert message in str(caught.value)
    with pytest.raises(ConfigError, match="quotes that are closed"):
        words_of_script("echo 'x", "run.sh")
