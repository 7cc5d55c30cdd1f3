"""Folders of a run that only grew: exports and logs stay within what the configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.actors.supervisor.log_bound import LogBound
from physarum.actors.supervisor.process import log_tail
from physarum.actors.trainer.exports import retain
from physarum.bus.version import Version


def exported(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"weights")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_newest_exports_stay_by_epoch_and_number_not_by_name(tmp_path: Path) -> None:
    exported(tmp_path, "policy@1.9", "policy@1.10", "policy@2.3", "policy@1.100")
    assert retain(tmp_path, Version("policy", 2, 3), keep=2) == ["policy@1.10", "policy@1.9"]
    assert names(tmp_path) == {"policy@1.100", "policy@2.3"}


def test_null_keeps_all_and_what_is_no_export_of_this_model_is_not_touched(tmp_path: Path) -> None:
    exported(tmp_path, "policy@1.1", "policy@1.2", "judge@1.1", "my notes")
    assert retain(tmp_path, Version("policy", 1, 2), keep=None) == []
    assert retain(tmp_path, Version("policy", 1, 2), keep=1) == ["policy@1.1"]
    assert names(tmp_path) == {"policy@1.2", "judge@1.1", "my notes"}


def test_an_export_that_was_killed_goes_and_a_successors_stays(tmp_path: Path) -> None:
    """A trainer that lost its lease must not remove what its successor writes or has written."""
    exported(tmp_path, "policy@1.1", ".policy@1.2-writing", ".policy@2.5-writing", "policy@2.4")
    assert retain(tmp_path, Version("policy", 1, 3), keep=1) == [".policy@1.2-writing"]
    assert names(tmp_path) == {"policy@1.1", ".policy@2.5-writing", "policy@2.4"}


def test_a_log_above_its_bytes_is_cut_while_its_process_writes_on(tmp_path: Path) -> None:
    path, small = tmp_path / "rollout-0.log", tmp_path / "reward-0.log"
    small.write_bytes(b"x" * 100)
    bound = LogBound(tmp_path, limit_bytes=100, period_s=1.0)
    with path.open("ab", buffering=0) as log:
        for turn in (b"first", b"second"):
            log.write(turn * 30 + b"\n")
            bound.look()
            assert path.stat().st_size == 0
            log.write(b"after " + turn + b"\n")
            assert path.read_bytes() == b"after " + turn + b"\n"
    assert (tmp_path / "rollout-0.log.1").read_bytes() == b"after first\n" + b"second" * 30 + b"\n"
    assert names(tmp_path) == {"rollout-0.log", "rollout-0.log.1", "reward-0.log"}
    assert small.stat().st_size == 100


def test_the_last_lines_of_a_log_that_was_cut_are_found(tmp_path: Path) -> None:
    """The incarnation began at byte 500 of what is a file of 6 bytes now."""
    (tmp_path / "a.log").write_text("error\n")
    assert log_tail(tmp_path / "a.log", 5, start=500) == "error"


def test_a_log_that_cannot_be_copied_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * 101)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    LogBound(tmp_path, limit_bytes=100, period_s=1.0).look()
    assert names(tmp_path) == {"a.log"} and (tmp_path / "a.log").stat().st_size == 101
    assert "is not cut to supervisor.log_bytes" in caplog.text
