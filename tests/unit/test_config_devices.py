"""A device has one holder, and asking for more than there are is refused naming both numbers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from physarum.configs import devices
from physarum.configs.devices import PresentDevices, assign_devices, present_devices
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

SFT = """\
run: {name: sft}
model: {path: start}
source: {hook: "calculator:source"}
trainer: {objective: sft, lr: 3e-3}
engines: {policy: {}}
stop: {steps: 10}
"""


def load(folder: Path, *words: str) -> RootConfig:
    (folder / "c.yaml").write_text(SFT)
    return resolve(folder / "c.yaml", parse_command_line(words))


def test_lists_are_given_first_and_counts_take_the_rest(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer.gpus=1", "engines.policy.gpus=[0, 2]", "engines.policy.count=2", "reward.gpus=1")
    present = PresentDevices(4, "nvidia-smi lists 4")
    assert assign_devices(config, present) == {"trainer": (1,), "reward": (3,), "engines.policy": (0, 2)}


def test_over_subscription_names_both_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer.gpus=1", "engines.policy.gpus=2")
    with pytest.raises(ConfigError) as caught:
        assign_devices(config, PresentDevices(2, "nvidia-smi lists 2"))
    message = str(caught.value)
    assert "found 3 devices asked for: 1 (`trainer.gpus`) + 2 (`engines.policy.gpus`)" in message
    assert "expected at most the 2 devices present (nvidia-smi lists 2)" in message
    assert "lower `gpus` by 1 in all" in message


def test_a_device_with_two_holders_or_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer.gpus=[0]", "engines.policy.gpus=[0]", "reward.gpus=[7]")
    with pytest.raises(ConfigError) as caught:
        assign_devices(config, PresentDevices(4, "nvidia-smi lists 4"))
    assert "device 0 in `trainer.gpus` and in `engines.policy.gpus`" in str(caught.value)
    assert "found device 7; expected an index below 4" in str(caught.value)


def test_external_engines_hold_none_of_our_devices(tmp_path: Path) -> None:
    config = load(tmp_path, "engines.policy.gpus=2", "engines.policy.url=http://host:1")
    assert assign_devices(config, PresentDevices(0, "none")) == {}


def test_a_host_without_the_driver_has_no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert present_devices() == PresentDevices(0, "nvidia-smi is not installed")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\necho 1\n")
    tool.chmod(0o755)
    assert present_devices() == PresentDevices(2, "nvidia-smi lists 2")
    tool.write_text("#!/bin/sh\necho driver mismatch\nexit 9\n")
    assert present_devices() == PresentDevices(0, "nvidia-smi failed: driver mismatch")


@pytest.mark.parametrize(
    ("variable", "names"),
    [("1", ("1",)), ("2, 0", ("2", "0")), ("", ()), ("-1", ()), ("0,7,1", ("0",)), ("GPU-5e4a", ("GPU-5e4a",))],
)
def test_only_the_devices_that_the_environment_shows_are_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, names: tuple[str, ...]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\necho 1\necho 2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = present_devices()
    assert (found.count, found.names) == (len(names), names)
    assert [found.name(index) for index in range(found.count)] == list(names)


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr(devices.subprocess, "run", hang)
    assert present_devices() == PresentDevices(0, "nvidia-smi did not answer within 10 s")
