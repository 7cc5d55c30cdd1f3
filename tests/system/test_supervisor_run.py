"""The supervisor with real processes and a real bus; the actors are stubs (supervisor_stub.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from supervisor_run import LIMIT_S, QUIET, StubRun, processes_of, stub_run, write_config

from physarum.actors.supervisor.errors import ActorFailedError, InterruptedRunError, RunFinishedError, RunHeldError
from physarum.actors.supervisor.process import read_records

pytestmark = pytest.mark.timeout(120)


async def test_a_finished_run_leaves_its_summary_and_no_process(tmp_path: Path) -> None:
    evaluation = {"hook": "physarum.agents.calculator.problems:HeldOut", "problems": 4}
    engines = {"policy": {"url": "http://127.0.0.1:1"}}
    stub = {"trainer-0": "train 3", "evaluator-0": "evaluate"}
    async with stub_run(write_config(tmp_path, stub, evaluation=evaluation, engines=engines)) as run:
        summary = await run.result()
    assert (summary["reward_start"], summary["reward_end"]) == (0.25, 0.75)
    assert (summary["steps"], summary["versions"], summary["tokens_trained"]) == (3, 3, 120)
    assert summary["account"] | {"issued": 13, "trained": 12, "in_flight": 1, "imbalance": 0} == summary["account"]
    assert json.loads(run.folder.summary.read_text()) == summary
    assert [metric.values["number"] for metric in run.watch.metrics if metric.kind == "step"] == [1, 2, 3]
    assert processes_of(run.folder.path) == []
    async with stub_run(tmp_path / "stub.yaml") as again:
        with pytest.raises(RunFinishedError, match="run.name=NAME"):
            await again.result()


async def test_a_killed_actor_is_started_again_and_the_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_GATE", str(tmp_path / "gate"))
    async with stub_run(write_config(tmp_path, {"trainer-0": "train 1"})) as run:
        await run.until_logged("source-0", "-> ready")
        first = run.record("source-0")
        os.kill(first.pid, signal.SIGKILL)
        await run.until(lambda: run.record("source-0").pid != first.pid)
        assert run.record("source-0").restarts == 1
        (tmp_path / "gate").touch()
        assert (await run.result())["steps"] == 1


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("exit 78", ["trainer/trainer-0", "status 78", "starting it again cannot help", "ends on purpose", "Remedy"]),
        ("exit 3", ["trainer/trainer-0", "status 3", "second time without ever having been ready", "'starting'"]),
        ("crash 1", ["trainer/trainer-0", "after 2 restarts within 300 s", "max_restarts is 2"]),
    ],
)
async def test_an_actor_that_cannot_run_ends_the_run_by_name(tmp_path: Path, behaviour: str, words: list[str]) -> None:
    settings = {**QUIET, "max_restarts": 2}
    async with stub_run(write_config(tmp_path, {"trainer-0": behaviour}, supervisor=settings)) as run:
        with pytest.raises(ActorFailedError) as failure:
            await run.result()
    for word in words:
        assert word in str(failure.value)
    assert processes_of(run.folder.path) == []


async def test_an_interrupted_run_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path, {"trainer-0": "train 2"})
    monkeypatch.setenv("STUB_GATE", "/nonexistent")
    async with stub_run(path) as run:
        await run.until(lambda: any(metric.kind == "step" for metric in run.watch.metrics))
        run.stop.ask()
        with pytest.raises(InterruptedRunError):
            await run.result()
    assert processes_of(run.folder.path) == []
    assert not run.folder.summary.exists()
    async with stub_run(path) as second:
        await second.until(second.started.is_set)
        assert second.server().port == json.loads((second.folder.bus / "server.json").read_text())["port"]
        assert second.folder.start_model.resolve() == tmp_path / "model"


async def test_asking_twice_kills_an_actor_that_does_not_drain(tmp_path: Path) -> None:
    settings = {**QUIET, "drain_timeout_s": 600.0}
    async with stub_run(write_config(tmp_path, {"source-0": "deaf"}, supervisor=settings)) as run:
        await run.until_logged("source-0", "-> ready")
        run.stop.ask()
        run.stop.ask()
        with pytest.raises(InterruptedRunError):
            await run.result()
    assert processes_of(run.folder.path) == []


async def test_an_actor_that_does_not_drain_is_killed_after_the_timeout(tmp_path: Path) -> None:
    settings = {**QUIET, "drain_timeout_s": 0.5}
    async with stub_run(write_config(tmp_path, {"source-0": "deaf"}, supervisor=settings)) as run:
        await run.until_logged("source-0", "-> ready")
        run.stop.ask()
        with pytest.raises(InterruptedRunError):
            await run.result()
    assert processes_of(run.folder.path) == []


async def test_what_a_killed_actor_leaves_in_its_session_is_killed(tmp_path: Path) -> None:
    async with stub_run(write_config(tmp_path, {"source-0": "family"})) as run:
        await run.until_logged("source-0", "-> ready")
        actor, child = run.record("source-0"), int((run.folder.path / "family.pid").read_text())
        os.kill(actor.pid, signal.SIGKILL)
        await run.until(lambda: run.record("source-0").pid != actor.pid)
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


async def test_a_hung_actor_is_killed_and_started_again(tmp_path: Path) -> None:
    settings = {**QUIET, "heartbeat_s": 0.2, "heartbeat_limit_s": 1.0}
    async with stub_run(write_config(tmp_path, {}, supervisor=settings)) as run:
        await run.until_logged("source-0", "-> ready")
        hung = run.record("source-0")
        os.kill(hung.pid, signal.SIGSTOP)
        await run.until(lambda: run.record("source-0").pid != hung.pid)


async def test_the_bus_is_started_again_on_its_port_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_GATE", str(tmp_path / "gate"))
    async with stub_run(write_config(tmp_path, {"trainer-0": "train 1"})) as run:
        await run.until(lambda: any(metric.kind == "step" for metric in run.watch.metrics))
        before = run.server()
        os.kill(before.pid, signal.SIGKILL)
        server_file = run.folder.bus / "server.json"
        await run.until(lambda: json.loads(server_file.read_text())["pid"] != before.pid)
        (tmp_path / "gate").touch()
        summary = await run.result()
        assert (summary["steps"], summary["versions"], summary["account"]["imbalance"]) == (1, 1, 0)
        assert json.loads(server_file.read_text())["port"] == before.port


async def test_a_second_supervisor_of_a_run_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, {})
    async with stub_run(path) as run:
        await run.until(run.started.is_set)
        async with stub_run(path) as second:
            with pytest.raises(RunHeldError, match=f"process {os.getpid()}"):
                await second.result()
        assert not run.ended.done()


async def test_an_actor_that_announced_its_end_is_left_ended(tmp_path: Path) -> None:
    async with stub_run(write_config(tmp_path, {"source-0": "finish"})) as run:
        await run.until_logged("source-0", "-> finished")
        pid = run.record("source-0").pid
        with contextlib.suppress(psutil.NoSuchProcess):
            await asyncio.to_thread(psutil.Process(pid).wait, LIMIT_S)
        await run.until_logged("trainer-0", "-> ready")
        assert run.record("source-0").pid == pid
        run.stop.ask()
        with pytest.raises(InterruptedRunError):
            await run.result()


@pytest.mark.slow
async def test_the_start_model_is_made_by_another_run_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHYSARUM_CACHE", str(tmp_path / "cache"))
    maker = write_config(tmp_path, {"trainer-0": "train 1"}).rename(tmp_path / "maker.yaml")
    path = write_config(tmp_path, {"trainer-0": "train 1"}, model={"made_by": maker.name})
    for name, was_cached in (("first", False), ("second", True)):
        path.write_text(path.read_text().replace("name: stub", f"name: {name}").replace("name: first", f"name: {name}"))
        async with stub_run(path) as run:
            summary = await run.result()
        assert summary["setup_seconds"]["sft_cached"] is was_cached
        assert summary["setup_seconds"]["sft"] > 0
        assert (run.folder.start_model / "config.json").read_text() == "{}"
        assert any("making the start model by the run stub-" in text for text in run.watch.said) is not was_cached


@pytest.mark.slow
async def test_a_run_is_scaled_while_it_works_and_is_as_large_when_it_is_continued(tmp_path: Path) -> None:
    rewards = {"count": 2, "hook": "physarum.agents.calculator.reward:exact_match"}
    async with stub_run(write_config(tmp_path, {}, reward=rewards)) as run:
        await run.until_logged("reward-1", "-> ready")
        await _actorctl(run.folder.path, "scale", "reward=4")
        await run.until_logged("reward-3", "-> ready")
        await _actorctl(run.folder.path, "cordon", "reward-3")
        await run.until_logged("reward-3", "-> paused")
        await _actorctl(run.folder.path, "drain", "reward-0")
        await run.until(lambda: _instances(run, "reward") == {"reward-1", "reward-2", "reward-3"})
        run.stop.ask()
        with pytest.raises(InterruptedRunError):
            await run.result()
    async with stub_run(tmp_path / "stub.yaml") as again:
        await again.until(lambda: _instances(again, "reward") == {"reward-1", "reward-2", "reward-3"})
        await _actorctl(again.folder.path, "scale", "reward=1", "reward=+1")
        await again.until(lambda: _instances(again, "reward") == {"reward-0", "reward-1"})


def _instances(run: StubRun, role: str) -> set[str]:
    return {record.instance for record in read_records(run.folder.actors) if record.role == role and record.alive}


async def _actorctl(folder: Path, command: str, *arguments: str) -> None:
    words = [sys.executable, "-m", "physarum.actors.actorctl", command, folder.name, *arguments]
    done = await asyncio.to_thread(
        subprocess.run, [*words, "--root", str(folder.parent)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
