"""Stores and checkpoints that are not as they were left: refused by name, nothing lost, and the run goes on once restored.

One run is trained, stopped and kept; each test damages a copy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import bad_input
import psutil
import pytest
from bad_input import NAME, actorctl, configuration, refused, write

from physarum.actors.supervisor.run_folder import LAYOUT

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that was stopped in order, after at least one checkpoint."""
    folder = tmp_path_factory.mktemp("store")
    write(folder, configuration() | {"stop": {"steps": 100_000}})
    try:
        begun = actorctl(folder, "up", "run.yaml", "--detach")
        assert begun.returncode == 0, begun.stderr
        checkpoints = folder / "runs" / NAME / "checkpoints"
        bad_input.until(lambda: any(checkpoints.glob("1.*")), "a checkpoint")
        assert actorctl(folder, "down", NAME).returncode == 0
        yield folder
    finally:
        bad_input.end_processes_of(folder)


@pytest.fixture
def folder(stopped: Path) -> Iterator[Path]:
    """The stopped run; what the test does to it is undone afterwards (its paths are recorded, so it stays in place)."""
    kept = stopped.with_name(f"{stopped.name}-kept")
    shutil.copytree(stopped, kept, symlinks=True)
    yield stopped
    left = bad_input.processes_of(stopped)
    bad_input.end_processes_of(stopped)
    shutil.rmtree(stopped)
    kept.rename(stopped)
    assert left == []


def run_of(folder: Path) -> Path:
    return folder / "runs" / NAME


def block(folder: Path, stream: str) -> Path:
    """The stream's file of messages."""
    (found,) = run_of(folder).glob(f"bus/store/jetstream/*/streams/{NAME}_{stream}/msgs/*.blk")
    return found


def flip(path: Path) -> None:
    """Inverts one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def newest_checkpoint(folder: Path) -> Path:
    return max(run_of(folder).glob("checkpoints/1.*"), key=lambda path: [int(part) for part in path.name.split(".")])


@pytest.mark.slow
def test_an_altered_store_is_refused_by_the_files_name_and_goes_on_once_restored(folder: Path) -> None:
    before = bad_input.account(folder)
    path = block(folder, "LEDGER")
    flip(path)
    for command in (("up", "run.yaml"), ("ledger", NAME)):
        refused(actorctl(folder, *command), 1, "LEDGER/msgs/1.blk has digest", "expected", "Restore it from a copy")
    flip(path)
    assert bad_input.account(folder) == before
    with bad_input.started(folder, "run.yaml") as up:
        bad_input.until(lambda: "step " in (folder / "up.log").read_text(), "another step")
        up.send_signal(signal.SIGINT)
        assert up.wait(bad_input.LIMIT_S) == 130
    after = bad_input.account(folder)
    assert after["trained"] > before["trained"]
    assert (after["imbalance"], after["double_trained"]) == (0, 0)


def test_a_store_that_lost_a_file_is_refused(folder: Path) -> None:
    block(folder, "SAMPLES").unlink()
    refused(actorctl(folder, "up", "run.yaml"), 1, "SAMPLES/msgs/1.blk is missing", "Restore it from a copy")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(flip, "has digest", id="altered"),
        pytest.param(Path.unlink, "is missing; restore it from a copy", id="missing"),
    ],
)
@pytest.mark.slow
def test_a_damaged_checkpoint_ends_the_run_by_its_files_name(folder: Path, damage: object, words: str) -> None:
    victim = max(newest_checkpoint(folder).iterdir(), key=lambda path: path.stat().st_size)
    assert callable(damage)
    damage(victim)
    done = actorctl(folder, "up", "run.yaml")
    refused(done, 1, "error: the actor trainer/trainer-0", f"checkpoint file {victim}", words, "Remedy")


@pytest.mark.parametrize(("found", "named"), [("0", "layout version '0'"), (None, "no layout version")])
def test_a_run_of_another_version_is_refused_with_the_way_out(folder: Path, found: str | None, named: str) -> None:
    version = run_of(folder) / "VERSION"
    version.unlink() if found is None else version.write_text(found)
    words = (named, f"expected '{LAYOUT}'", "version that made it", "run.name=NAME")
    for command in (("up", "run.yaml"), ("ledger", NAME), ("down", NAME)):
        refused(actorctl(folder, *command), 2, *words)


@pytest.mark.slow
def test_a_second_supervisor_is_refused_and_a_dead_ones_server_and_actors_are_adopted(folder: Path) -> None:
    assert actorctl(folder, "up", "run.yaml", "--detach").returncode == 0
    state = json.loads(actorctl(folder, "ps", NAME, "--json").stdout)
    refused(
        actorctl(folder, "up", "run.yaml"),
        2,
        f"already has a supervisor: process {state['supervisor']}",
        "actorctl down",
    )

    os.kill(state["supervisor"], signal.SIGKILL)
    bad_input.until(lambda: not psutil.pid_exists(state["supervisor"]), "the supervisor's end")
    record = run_of(folder) / "bus" / "server.json"
    server = json.loads(record.read_text())["pid"]
    record.unlink()  # as if the supervisor had died while it started the server
    assert actorctl(folder, "up", "run.yaml", "--detach").returncode == 0
    assert json.loads(record.read_text())["pid"] == server
    again = json.loads(actorctl(folder, "ps", NAME, "--json").stdout)
    assert {actor["pid"] for actor in again["actors"]} == {actor["pid"] for actor in state["actors"]}
    assert actorctl(folder, "down", NAME).returncode == 0
    found = bad_input.account(folder)
    assert (found["imbalance"], found["double_trained"]) == (0, 0)
