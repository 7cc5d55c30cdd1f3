"""One group of different servers: each number has its part, arguments, devices; what cannot serve together is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.configs.devices import PresentDevices, assign_devices
from physarum.configs.engine import EngineConfig
from physarum.configs.errors import ConfigError
from physarum.configs.loader import dump, resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

SFT = """\
run: {name: sft}
model: {path: start}
source: {hook: "calculator:source"}
trainer: {objective: sft, lr: 3e-3}
stop: {steps: 10}
"""
PAIRS = """\
engines:
  policy:
    sglang: {mem-fraction-static: 0.8, chunked_prefill_size: 4096}
    env: {A: 1}
    servers:
      - {role: prefill, count: 2, gpus: 4, sglang: {tp_size: 2}}
      - {role: placeholder, gpus: 1}
      - {role: decode, count: 3, gpus: 3, sglang: {chunked-prefill-size: null, mem-fraction-static: 0.9}, env: {B: 2}}
"""


def load(folder: Path, engines: str, *words: str) -> RootConfig:
    (folder / "c.yaml").write_text(SFT + engines)
    return resolve(folder / "c.yaml", parse_command_line(words))


def test_each_server_has_the_arguments_of_its_part_over_those_of_the_group(tmp_path: Path) -> None:
    group = load(tmp_path, PAIRS).engines["policy"]
    assert group.instances == 5
    assert [group.part_of(number).role for number in range(5)] == ["prefill"] * 2 + ["decode"] * 3
    assert group.of_server(1).sglang == {"mem-fraction-static": 0.8, "chunked-prefill-size": 4096, "tp-size": 2}
    assert group.of_server(4).sglang == {"mem-fraction-static": 0.9}
    assert group.of_server(4).env == {"A": "1", "B": "2"}
    assert group.place(9) == (2, 7), "what `scale` adds is of the last part"


def test_devices_are_given_to_parts_and_a_placeholder_keeps_its_own(tmp_path: Path) -> None:
    config = load(tmp_path, PAIRS, "trainer.gpus=1")
    assert assign_devices(config, PresentDevices(9, "nine")) == {
        "trainer": (0,),
        "engines.policy.servers.0": (1, 2, 3, 4),
        "engines.policy.servers.1": (5,),
        "engines.policy.servers.2": (6, 7, 8),
    }


def test_a_dumped_configuration_with_parts_is_read_back(tmp_path: Path) -> None:
    config = load(tmp_path, PAIRS)
    (tmp_path / "d.yaml").write_text(dump(config))
    assert resolve(tmp_path / "d.yaml").engines["policy"].of_server(4) == config.engines["policy"].of_server(4)


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ("[{role: prefill}]", "add a part with `role: decode`"),
        ("[{role: decode}, {role: placeholder, gpus: 1}]", "add a part with `role: prefill`"),
        ("[{role: prefill}, {role: decode}, {role: regular}]", "make two groups of them"),
        ("[{role: encoder}]", "encoders alone"),
        ("[{role: placeholder, gpus: 2}]", "at least one part with servers"),
        ("[{role: placeholder}]", "name the devices that it keeps"),
        ("[{count: 0}]", "at least one server"),
        ("[{role: decoder}]", "'regular', 'prefill', 'decode', 'encoder' or 'placeholder'"),
        ("[{rol: prefill}]", "did you mean `engines.policy.servers.0.role`"),
        ("[{count: 2}]\n    count: 3", "`servers` with `count`"),
        ("[{count: 2}]\n    gpus: 3", "write gpus into the parts"),
    ],
)
def test_what_cannot_serve_is_refused(tmp_path: Path, servers: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"engines:\n  policy:\n    servers: {servers}\n")
    assert words in str(caught.value)


def test_defaults_of_all_groups_lie_under_each_and_the_command_line_over_them(tmp_path: Path) -> None:
    text = """\
engines:
  "*": {sglang: {mem-fraction-static: 0.7, schedule-policy: fcfs}, update_timeout_s: 30}
  policy:
  judge: {model: m, sglang: {mem-fraction-static: 0.4}, update_timeout_s: 9}
"""
    engines = load(tmp_path, text, "--sglang-schedule-policy", "lpm", "--router-policy", "random").engines
    assert list(engines) == ["policy", "judge"]
    assert engines["policy"].sglang == {"mem-fraction-static": 0.7, "schedule-policy": "lpm"}
    assert engines["judge"].sglang == {"mem-fraction-static": 0.4, "schedule-policy": "lpm"}
    assert (engines["policy"].update_timeout_s, engines["judge"].update_timeout_s) == (30, 9)
    assert engines["policy"].start_router == {"policy": "random"}
    assert engines["judge"].start_router is None, "nobody asks a frozen model through a router"


def test_a_misspelt_default_is_named_where_it_was_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, 'engines:\n  "*": {update_timeout: 3}\n  policy: {}\n')
    assert "c.yaml:7: engines.policy.update_timeout" in str(caught.value)
    with pytest.raises(ConfigError, match="define a group"):
        load(tmp_path, 'engines:\n  "*": {update_timeout_s: 3}\n')


def test_a_plain_group_is_one_part() -> None:
    group = EngineConfig(count=3, gpus=6)
    assert [(part.role, part.started) for part in group.parts] == [("regular", 3)]
    assert group.part_of(7).role == "regular" and not group.paired
