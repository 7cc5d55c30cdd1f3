"""What can be known to be wrong before a process starts is one message with the remedy; nothing is started or left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import bad_input
import pytest
from bad_input import actorctl, configuration, refused, write

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write(tmp_path, configuration())
    yield tmp_path
    left = bad_input.processes_of(tmp_path)
    bad_input.end_processes_of(tmp_path)
    assert left == []


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


def test_unknown_key_names_the_line_and_the_nearest_key(folder: Path) -> None:
    values = configuration()
    values["trainer"]["chekpoint_every"] = 4
    path = write(folder, values)
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "chekpoint" in text)
    words = (f"run.yaml:{line}: trainer.chekpoint_every: found unknown key", "did you mean `trainer.checkpoint_every`")
    for command in ("check", "up"):
        refused(actorctl(folder, command, "run.yaml"), 2, *words)
    assert not (folder / "runs").exists()
    assert "Traceback" in actorctl(folder, "up", "run.yaml", "-v").stderr


def test_missing_model_folder_names_the_path(folder: Path) -> None:
    write(folder, {**configuration(), "model": {"path": "nosuch/model"}})
    refused(
        actorctl(folder, "up", "run.yaml"),
        2,
        "model.path: found no folder nosuch/model",
        "expected a Hugging Face",
        "put",
    )
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("source.hook=nosuch.module:Rows", ("no module `nosuch`", "expected an importable module", "set PYTHONPATH")),
        ("source.hook=physarum.agents.calculator.problems:Nosuch", ("no `Nosuch` in", "define it there or correct")),
        (
            "reward.hook=hooks:wrong",
            ("wrong(a, b, c)", "expected a callable (execution)", "change the function's parameters"),
        ),
        ("rollout.generate=hooks:not_async", ("hook hooks:not_async", "async", "Remedy")),
        ("rollout.generate=hooks:nothing_here:x", ("expected a hook, `package.module:attribute`", "with one colon")),
    ],
)
def test_hook_that_cannot_be_called_is_refused_before_anything_starts(
    folder: Path, setting: str, words: tuple[str, ...]
) -> None:
    (folder / "hooks.py").write_text("def wrong(a, b, c): return 1.0\ndef not_async(task, client): return []\n")
    refused(actorctl(folder, "up", "run.yaml", setting), 2, f"command line: {setting.partition('=')[0]}: found", *words)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("key", ["bus.port", "checkpoint.port"])
def test_port_in_use_is_named_with_its_key(folder: Path, taken_port: int, key: str) -> None:
    words = (f"{key}: found port {taken_port}, which is in use", "expected a free port", "choose another port")
    refused(actorctl(folder, "up", "run.yaml", f"{key}={taken_port}"), 2, *words)
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_bus_that_does_not_answer_is_named_and_its_correction_is_accepted(folder: Path, taken_port: int) -> None:
    """The second server accepts and says nothing. A run that never reached its bus is not bound to the wrong URL."""
    for url in ("nats://127.0.0.1:9", f"nats://127.0.0.1:{taken_port}"):
        done = actorctl(folder, "up", "run.yaml", f"bus.url={url}", "bus.start_timeout_s=1.5")
        refused(done, 4, f"no NATS server accepted a connection at {url} within 1.5 s", "correct bus.url")
        assert "connection lost" not in done.stdout + done.stderr  # there never was one
    corrected = actorctl(folder, "up", "run.yaml")
    assert corrected.returncode == 0, corrected.stderr
    assert bad_input.account(folder)["imbalance"] == 0


def test_data_without_a_usable_line_is_refused(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"promt": 1}\n[1]\n{"prompt"\n')
    values = configuration()
    values["source"] = {"name": "demos", "data": "rows.jsonl", "group_size": 1}
    write(folder, values)
    done = actorctl(folder, "up", "run.yaml")
    refused(done, 2, "no usable row in rows.jsonl", "expected rows with the column `prompt`", "source.columns")
