"""A disk that fills up while a run trains: it waits in sight of the user, and goes on by itself when there is room."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import bad_input
import pytest
import torch
from bad_input import NAME, actorctl, configuration, write

from physarum.actors.trainer.hf_folder import write_hf_folder
from physarum.bus import room

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

DISK_BYTES = 96 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A working folder whose `runs` is a disk of its own."""
    runs = tmp_path / "runs"
    runs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(runs)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield tmp_path
        assert bad_input.processes_of(tmp_path) == []
    finally:
        bad_input.end_processes_of(tmp_path)
        subprocess.run(["umount", "-l", str(runs)], check=True)


def fill(path: Path) -> None:
    """Takes every free byte of the disk."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            os.fsync(file.fileno())


def steps(folder: Path) -> int:
    return (folder / "up.log").read_text().count(": step ")


@pytest.mark.slow
def test_a_full_disk_is_waited_for_in_sight_and_costs_nothing(folder: Path) -> None:
    write(folder, configuration() | {"stop": {"steps": 100_000}})
    said = folder / "up.log"
    with bad_input.started(folder, "run.yaml") as up:
        bad_input.until(lambda: steps(folder) >= 5, "five steps")
        fill(folder / "runs" / "filler")
        bad_input.until(lambda: f"the disk of runs/{NAME}/bus is full" in said.read_text(), "word of the full disk")
        assert "Free space there; the run then goes on by itself" in said.read_text()
        assert up.poll() is None
        (folder / "runs" / "filler").unlink()
        bad_input.until(lambda: "has room again: starting the bus anew" in said.read_text(), "word of the room")
        before = steps(folder)
        bad_input.until(lambda: steps(folder) >= before + 5, "five more steps")
        up.send_signal(signal.SIGINT)
        assert up.wait(bad_input.LIMIT_S) == 130
    assert "Traceback" not in said.read_text()
    found = bad_input.account(folder)
    assert (found["imbalance"], found["double_trained"], found["dead"]) == (0, 0, 0)
    assert found["trained"] >= before


@pytest.mark.slow
def test_a_full_disk_in_the_middle_of_a_commit_leaves_the_old_checkpoint_and_is_waited_for(folder: Path) -> None:
    """Only the checkpoints' disk is full here: the trainer alone meets it."""
    run = folder / "runs" / NAME
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(checkpoints)], check=True)
    write(folder, configuration() | {"stop": {"steps": 100_000}})
    said = folder / "up.log"
    try:
        with bad_input.started(folder, "run.yaml") as up:
            bad_input.until(lambda: any(checkpoints.glob("1.*")), "a checkpoint")
            fill(checkpoints / "filler")
            bad_input.until(
                lambda: "trainer-0 is waiting for room on the disk" in said.read_text(), "word of the full disk"
            )
            kept = {path.name for path in checkpoints.glob("1.*")}
            assert kept
            assert not any(checkpoints.glob(".writing-*/*"))
            (checkpoints / "filler").unlink()
            bad_input.until(lambda: not kept & {path.name for path in checkpoints.glob("1.*")}, "newer checkpoints")
            up.send_signal(signal.SIGINT)
            assert up.wait(bad_input.LIMIT_S) == 130
        found = bad_input.account(folder)
        assert (found["imbalance"], found["double_trained"], found["dead"]) == (0, 0, 0)
    finally:
        bad_input.end_processes_of(folder)
        subprocess.run(["umount", "-l", str(checkpoints)], check=True)


def test_a_model_that_does_not_fit_on_the_disk_is_known_as_a_full_disk(folder: Path) -> None:
    """The trainer waits for room on this error, whichever library met it."""
    start = folder / "start"
    start.mkdir()
    (start / "config.json").write_text("{}")
    with pytest.raises(OSError, match=r"[Nn]o space left") as met:
        write_hf_folder(start, folder / "runs" / "model", [("w", torch.zeros(DISK_BYTES // 4 + 1))])
    assert room.is_full(met.value)


def test_a_disk_that_is_full_from_the_start_is_refused(folder: Path) -> None:
    write(folder, configuration())
    fill(folder / "runs" / "filler")
    done = actorctl(folder, "up", "run.yaml")
    bad_input.refused(
        done, 2, "run.root (default): found 0 MiB free", "expected at least 64 MiB", "set `run.root` to another disk"
    )
