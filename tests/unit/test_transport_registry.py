"""Each engine gets the transport that is configured, or the first that suits it; what is lacking is named with its remedy."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from actor_fixture import BASE

from physarum.actors import preflight
from physarum.actors.engine import delivery
from physarum.actors.engine.environment import installed_in
from physarum.configs.engine import EngineConfig
from physarum.configs.errors import Problem, Severity
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.weightsync.carriers import registry
from physarum.weightsync.errors import TransportUnfitError
from physarum.weightsync.transports.registry import CHECKPOINT_ENGINE, KINDS, Surroundings, fitting

CARD = Surroundings(device="cuda", started_here=True, waits_for_weights=False)


def with_package(version: str, **changes: Any) -> Surroundings:
    return dataclasses.replace(CARD, packages={CHECKPOINT_ENGINE: version}, **changes)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (CARD, "ipc"),
        (dataclasses.replace(CARD, started_here=False), "disk"),
        (dataclasses.replace(CARD, device="cpu"), "disk"),
        (with_package("0.4.2", waits_for_weights=True), "checkpoint_engine"),
        (dataclasses.replace(CARD, waits_for_weights=True), "checkpoint_engine"),
        (dataclasses.replace(CARD, device="cpu", own_draft=True), "ipc"),
    ],
)
def test_auto_takes_the_first_that_suits_the_engine(found: Surroundings, name: str) -> None:
    assert fitting("auto", found).name == name


def test_what_is_configured_is_what_it_gets() -> None:
    for kind in KINDS:
        assert fitting(kind.name, with_package("0.4.2")) is kind


@pytest.mark.parametrize(
    ("configured", "found", "words"),
    [
        ("checkpoint_engine", with_package(""), "checkpoint-engine is not installed; install it in the engine's"),
        ("checkpoint_engine", with_package("0.3.4"), "checkpoint-engine 0.3.4 speaks an older protocol"),
        ("checkpoint_engine", with_package("0.10.1"), ""),
        ("checkpoint_engine", dataclasses.replace(CARD, device="cpu"), "knows CUDA only; set another"),
        ("auto", with_package("", waits_for_weights=True), "pip install --group engine-checkpoint"),
        ("disk", dataclasses.replace(CARD, own_draft=True), "drafts with a model of its own .*; set engines"),
        ("checkpoint_engine", with_package("0.4.2", own_draft=True), "SGLang would load versions into that too"),
        ("checkpoint_engine", with_package("0.4.2", on_this_host=False), "is on another host"),
        ("checkpoint_engine", with_package("0.4.2", replicated=True), "with dp-size or pp-size above 1; set another"),
        ("ipc", dataclasses.replace(CARD, own_draft=True, chooses_models=False), "use sglang >= 0.5.23"),
        ("disk", with_package("0.4.2", waits_for_weights=True), "first weights by checkpoint_engine alone"),
    ],
)
def test_what_is_lacking_is_named_with_its_remedy(configured: str, found: Surroundings, words: str) -> None:
    if not words:
        assert fitting(configured, found).name == configured
        return
    with pytest.raises(TransportUnfitError, match=words):
        fitting(configured, found)


@pytest.mark.parametrize(
    ("urls", "local"),
    [
        (["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], True),
        (["http://127.0.0.1:1", "http://10.0.0.7:1"], False),
        (["http://elsewhere:1"], False),
        (None, True),
    ],
)
def test_an_engine_at_an_address_of_this_host_is_on_it(urls: list[str] | None, local: bool) -> None:
    assert delivery.surroundings(EngineConfig.model_validate({"url": urls})).on_this_host is local


def test_no_name_server_is_asked_whether_an_engine_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked on the event loop: a name server that is silent would stop everything there."""
    for name in ("getfqdn", "gethostbyname", "gethostbyaddr", "getaddrinfo"):
        monkeypatch.setattr(socket, name, lambda *_: pytest.fail("a name was looked up"))
    own = {"eth0": [SimpleNamespace(address="10.0.0.7"), SimpleNamespace(address="fe80::1%eth0")]}
    monkeypatch.setattr(delivery.psutil, "net_if_addrs", lambda: own)
    monkeypatch.setattr(socket, "gethostname", lambda: "Node-7")
    for host, local in (
        ("10.0.0.7", True),
        ("[fe80::1]", True),
        ("node-7", True),
        ("10.0.0.8", False),
        ("node-7.b", False),
    ):
        assert delivery.surroundings(EngineConfig.model_validate({"url": f"http://{host}:1"})).on_this_host is local, (
            host
        )


def environment(folder: Path, *packages: str) -> Path:
    for package in packages:
        (folder / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
    return folder / "bin" / "python"


def test_the_check_before_the_start_looks_into_the_engines_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "detect_device", lambda: "cuda")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BASE.replace("engines: {policy: {}}", "engines: {policy: {transport: checkpoint_engine}}"))
    without, having = (
        environment(tmp_path / "a", "sglang-0.5.23"),
        environment(tmp_path / "b", "checkpoint_engine-0.4.2"),
    )
    assert (installed_in(without, "sglang"), installed_in(without, CHECKPOINT_ENGINE)) == ("0.5.23", "")
    assert installed_in(tmp_path / "nowhere" / "bin" / "python", CHECKPOINT_ENGINE) is None

    def problems(python: Path) -> list[Problem]:
        config = resolve(recipe, parse_command_line([f"engines.policy.python={python}"]))
        return list(preflight._transports(config))

    assert problems(having) == problems(tmp_path / "nowhere" / "bin" / "python") == []
    (problem,) = problems(without)
    assert "checkpoint-engine is not installed" in str(problem) and "engine-checkpoint" in problem.remedy


def test_the_check_before_the_start_names_a_carrier_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = tuple(dataclasses.replace(kind, modules=("no_such_module",)) for kind in registry.KINDS)
    monkeypatch.setattr(registry, "KINDS", kinds)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BASE)

    def problems(*words: str) -> list[Problem]:
        return list(preflight._carrier(resolve(recipe, parse_command_line(words))))

    (problem,) = problems("checkpoint.carrier=nixl")
    assert problem.severity is Severity.ERROR and "checkpoint.carrier nixl: no_such_module" in problem.found
    assert "pip install 'physarum[nixl]'" in problem.remedy and "`checkpoint.carrier: http`" in problem.remedy
    assert problems("checkpoint.carrier=http") == problems("checkpoint.carrier=auto", "checkpoint.token_env=T") == []
    (useless,) = problems("checkpoint.carrier=auto")
    assert useless.severity is Severity.WARNING and "checkpoint.token_env" in useless.found
