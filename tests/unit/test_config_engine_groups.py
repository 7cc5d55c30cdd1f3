"""Groups that cannot do what they are asked for are refused before a process starts, each with what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors import preflight
from physarum.configs.checks.engines import check_groups
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line

SFT = """\
run: {name: sft}
model: {path: start}
source: {hook: "calculator:source"}
trainer: {objective: sft, lr: 3e-3}
stop: {steps: 10}
engines:
  policy:
    %s
"""
PAIR = "servers: [{role: prefill%s}, {role: decode%s}]"


def problems(folder: Path, text: str) -> str:
    (folder / "c.yaml").write_text(SFT % text)
    return "\n".join(map(str, check_groups(resolve(folder / "c.yaml"))))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("router: http://h:1\n    start_router: {}", "`start_router` with `router`"),
        ("model: m\n    start_router: {}", "only they are asked through it"),
        (PAIR % ("", "") + "\n    model: m", "`model` with prefill and decode servers"),
        (PAIR % ("", "") + "\n    canary: {}", "would have no other half"),
        (PAIR % ("", "") + "\n    start_router: {}", "know the versions of both"),
        (PAIR % (", sglang: {disaggregation-transfer-backend: nixl}", ""), "the transfer backends mooncake, nixl"),
        (PAIR % ("", "") + "\n    sglang: {disaggregation-transfer-backend: fake}", "a backend that moves KV"),
        ("servers: [{role: encoder}, {}]", "what is trained has no encoder"),
        ("nodes: 2\n    transport: ipc", "a folder that all nodes read"),
        ("nodes: 2\n    url: http://h:1", "servers that are started here"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, words: str) -> None:
    found = problems(tmp_path, text)
    assert words in found and "c.yaml" in found and "`engines.policy`" in found


@pytest.mark.parametrize(
    "text",
    [
        "start_router: {policy: random}",
        PAIR % ("", ""),
        "count: 2",
        "nodes: 2",
        "servers: [{role: encoder}, {}]\n    model: m",
    ],
)
def test_what_fits_is_not(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text) == ""


def test_a_pair_cannot_report_what_engines_choose(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SFT % (PAIR % ("", "")))
    config = resolve(tmp_path / "c.yaml")
    config.trainer.algorithm.replay.__dict__["nucleus"] = True  # whatever else such a run needs
    (found,) = map(str, check_groups(config))
    assert "replay.nucleus: false" in found


def test_a_router_that_is_not_installed_is_named_before_the_start(tmp_path: Path) -> None:
    home = tmp_path / "engine"
    (home / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (home / "pyvenv.cfg").touch()
    (tmp_path / "c.yaml").write_text(SFT % f"start_router: {{}}\n    python: {home}/bin/python")
    config = resolve(tmp_path / "c.yaml")
    (problem,) = preflight._routers(config)
    assert "no sglang-router in" in problem.found and "pip install" in problem.remedy
    (home / "lib" / "python3.11" / "site-packages" / "sglang_router").mkdir()
    assert list(preflight._routers(config)) == []


def test_a_group_that_nobody_asks_is_named(tmp_path: Path) -> None:
    """A name that was mistyped starts engines that take every version and answer nobody."""
    (tmp_path / "c.yaml").write_text(SFT % "count: 1" + "\n  polcy: {count: 2}\n  judge: {model: judge}\n")
    (problem,) = preflight._unasked(resolve(tmp_path / "c.yaml"))
    assert "`engines.polcy` beside `engines.policy`" in problem.found and "engines.policy.servers" in problem.remedy


def test_a_chat_template_that_is_not_there_is_named_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(SFT % "count: 1")
    config = resolve(tmp_path / "c.yaml", parse_command_line([f"source.chat.template={tmp_path}/chat.jinja"]))
    (problem,) = preflight._template(config)
    assert problem.found == f"{tmp_path}/chat.jinja" and "a Jinja file" in problem.expected
    (tmp_path / "chat.jinja").touch()
    assert list(preflight._template(config)) == []
