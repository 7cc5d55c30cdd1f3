"""The command line is read as meant: numbers are numbers, flags take their value or true."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.configs.errors import ConfigError
from physarum.configs.origin import Origin
from physarum.configs.overrides import Override, apply_overrides, parse_command_line
from physarum.configs.yaml_file import Layer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trainer.lr=1e-4"], [(("trainer", "lr"), 1e-4)]),
        (["evaluation="], [(("evaluation",), None)]),
        (["source.data=[a, b]"], [(("source", "data"), ["a", "b"])]),
        (["a.b=c=d"], [(("a", "b"), "c=d")]),
        (
            ["engines.policy.sglang.mem-fraction-static=0.3"],
            [(("engines", "policy", "sglang", "mem-fraction-static"), 0.3)],
        ),
        (["--megatron-hidden-dropout", "0.1"], [(("trainer", "megatron", "hidden_dropout"), 0.1)]),
        (["--megatron-hidden_dropout=0.1"], [(("trainer", "megatron", "hidden_dropout"), 0.1)]),
        (["--sglang-top-k", "-1"], [(("engines", "*", "sglang", "top-k"), -1)]),
        (["--sglang-enable_metrics"], [(("engines", "*", "sglang", "enable-metrics"), True)]),
        (
            ["--sglang-enable-metrics", "run.seed=1"],
            [(("engines", "*", "sglang", "enable-metrics"), True), (("run", "seed"), 1)],
        ),
        (
            ["--sglang-a", "--megatron-b"],
            [(("engines", "*", "sglang", "a"), True), (("trainer", "megatron", "b"), True)],
        ),
        (["--sglang-a=x=y"], [(("engines", "*", "sglang", "a"), "x=y")]),
    ],
)
def test_words_become_overrides(words: list[str], expected: list[tuple[tuple[str, ...], object]]) -> None:
    assert parse_command_line(words) == [Override(key, value) for key, value in expected]  # type: ignore[arg-type]


def test_every_bad_word_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(["lr", "--sglan-port", "3", "a.b=[1"])
    messages = [str(problem) for problem in caught.value.problems]
    assert len(messages) == 4
    assert "found 'lr'; expected `section.key=value`" in messages[0]
    assert "did you mean `--sglang-...`" in messages[1]
    assert messages[3].startswith("command line: a.b:1:")


def test_sglang_flags_reach_every_group() -> None:
    layer = Layer({"engines": {"a": {}, "b": {"sglang": {"port": 1}}}}, {(): Origin(Path("x.yaml"), 1)})
    merged = apply_overrides(layer, parse_command_line(["--sglang-dtype", "float32"]))
    assert merged.values == {
        "engines": {"a": {"sglang": {"dtype": "float32"}}, "b": {"sglang": {"port": 1, "dtype": "float32"}}}
    }
    assert layer.values == {"engines": {"a": {}, "b": {"sglang": {"port": 1}}}}


def test_sglang_flags_without_a_group_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no engine group; .*define a group under `engines:`"):
        apply_overrides(Layer(), parse_command_line(["--sglang-dtype", "float32"]))
