"""Programs against tests: what is taken for a program, which tests are understood, and what a program can do to us.

The second half runs the real sandbox and needs bubblewrap; without it these tests are skipped, and nothing stands in for it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_recipe import load

from physarum.actors.preflight import _sandbox
from physarum.agents.rewards import sandbox
from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.code import Assertion, Dialogue, program_in, row_tests, same_output, score_code
from physarum.agents.rewards.errors import RewardError, SandboxError
from physarum.agents.rewards.sandbox import Sandbox, missing_programs
from physarum.configs.reward_types import CodeReward

MISSING = missing_programs(CodeReward())
real = pytest.mark.skipif(bool(MISSING), reason=f"the sandbox needs {', '.join(MISSING)}, which this host has not")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("so:\n```python\nprint(1)\n```\ndone", "print(1)\n"),
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("```python\na\n```\nthen\n```python\nb", None),  # cut off: the earlier block does not stand in for it
        ("<think>```python\na\n```</think>no program", None),
        ("print(1)", None),
        ("```python\n```", ""),
        ("", None),
    ],
)
def test_the_last_block_is_the_program(text: str, program: str | None) -> None:
    assert program_in(text) == program


@pytest.mark.parametrize(
    ("label", "tests"),
    [
        ({"inputs": ["1"], "outputs": ["2"]}, [Dialogue("1", "2")]),
        ('{"inputs": [["1", "2"]], "outputs": [3]}', [Dialogue("1\n2", "3")]),
        ([{"input": "1", "output": "2"}], [Dialogue("1", "2")]),
        ([{"input": None, "output": 2}], [Dialogue("", "2")]),
        ('{"inputs": ["1"], "outputs": [123456789012345678901]}', [Dialogue("1", "123456789012345678901")]),
        (["assert f(1) == 2"], [Assertion("assert f(1) == 2")]),
        (
            {"asserts": ["a()", "assert b"], "setup": "import x"},
            [Assertion("import x\na()"), Assertion("import x\nassert b")],
        ),
        ("assert f(1) == 2", [Assertion("\nassert f(1) == 2")]),
    ],
)
def test_forms_of_tests(label: Any, tests: list[Any]) -> None:
    assert row_tests(Answer(text="", label=label)) == tests
    assert row_tests(Answer(text="", metadata={"tests": label})) == tests


@pytest.mark.parametrize(
    "label",
    [
        *(None, "", [], {}, 7, {"inputs": ["1"], "outputs": []}, {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}),
        *(
            "# nothing is asserted",
            [""],
            ["x = 1"],
            "def check(candidate):\n    assert candidate(1) == 2",
            {"asserts": ["assert True", "\n"], "setup": "x = 1"},
        ),  # every program would pass
    ],
)
def test_a_row_without_usable_tests_is_named(label: Any) -> None:
    with pytest.raises(RewardError, match=r"task t has the tests .*expected one of"):
        row_tests(Answer(text="", label=label, task="t"))


def test_outputs_are_compared_but_for_blanks_at_ends() -> None:
    assert same_output("1 \n2\n\n", "1\n2", "lines")
    assert not same_output("1 2", "1\n2", "lines")
    assert same_output("1 2", "1\n2", "tokens")
    assert not same_output("12", "1 2", "tokens")


def test_a_host_without_bubblewrap_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path, "type: code")
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    (problem,) = _sandbox(config)
    assert "c.yaml:9" in str(problem) and "found no bwrap" in str(problem) and "install bubblewrap" in str(problem)


async def test_a_sandbox_that_does_not_start_says_nothing_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where namespaces are forbidden, bwrap exits with 1 as a failing program does."""
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(Sandbox, "_command", lambda self, sources, status: [str(stand_in)])
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        await scored("print(1)", {"inputs": [""], "outputs": ["1"]})


async def scored(program: str, tests: Any, **options: Any) -> float:
    text = f"```python\n{program}\n```"
    return await score_code(Answer(text=text, label=tests, task="t"), CodeReward(**options))


async def ended(program: str, timeout_s: float = 10.0, **options: Any) -> sandbox.Ended:
    return await Sandbox(CodeReward(**options)).run(program, {}, b"", timeout_s)


DOUBLE = "print(int(input()) * 2)"
PAIRS = {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "7"]}


@real
async def test_dialogues_pass_fail_or_count_in_part() -> None:
    assert await scored(DOUBLE, {"inputs": ["1", "2"], "outputs": ["2\n", "4"]}) == 1.0
    assert await scored(DOUBLE, PAIRS) == 0.0
    assert await scored(DOUBLE, PAIRS, partial=True) == pytest.approx(2 / 3)
    assert await scored("print(2); raise ValueError", {"inputs": [""], "outputs": ["2"]}) == 0.0
    assert await scored("not python", {"inputs": [""], "outputs": [""]}) == 0.0


@real
async def test_asserts_pass_only_by_coming_to_their_end() -> None:
    double, asks = "def f(x): return 2 * x", ["assert f(1) == 2", "assert f(2) == 4"]
    assert await scored(double, asks) == 1.0
    assert await scored(double, ["assert f(1) == 3"]) == 0.0
    assert await scored(f"{double}\nif __name__ == '__main__': input()", asks) == 1.0
    for early in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit", "x = '''"):
        assert await scored(early, asks) == 0.0


@real
async def test_no_network_no_files_of_ours_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "s3cr3t")
    told = await ended(
        "import os, socket\n"
        "try: socket.create_connection(('127.0.0.1', 22), 1)\n"
        "except OSError as error: print(type(error).__name__)\n"
        "print(sorted(os.listdir('/')), os.environ.get('SOME_SECRET'), os.getuid() != 0)\n"
        "for path in ('/x', '/usr/x', '/dev/shm/x', '/main.py'):\n"
        "    try: open(path, 'w')\n"
        "    except OSError: print('refused')\n"
    )
    lines = told.output.decode().splitlines()
    assert lines[0] in ("ConnectionRefusedError", "OSError")
    assert lines[1] == "['bin', 'dev', 'lib', 'lib64', 'main.py', 'proc', 'tmp', 'usr'] None True"
    assert lines[2:] == ["refused"] * 4


@real
async def test_a_fork_bomb_is_bounded_and_leaves_nothing() -> None:
    before = programs()
    told = await ended(
        "import os, time\nmade = 0\n"
        "try:\n    while True:\n        if os.fork() == 0:\n            os.setsid(); time.sleep(600)\n        made += 1\n"
        "except OSError: print(made < 16)\n",
        processes=16,
    )
    assert (told.exit_code, told.output) == (0, b"True\n")
    bomb = await ended("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n", timeout_s=0.5)
    assert "longer than 0.5 s" in bomb.stopped
    assert not programs() - before


@real
async def test_floods_of_memory_files_and_output_are_bounded() -> None:
    memory = await ended("try: bytearray(2 << 30)\nexcept MemoryError: print('bounded')")
    assert memory.output == b"bounded\n"
    files = await ended(
        "written = 0\n"
        "try:\n    for i in range(1000):\n        with open(f'/tmp/{i}', 'wb') as f: written += f.write(bytes(1 << 20))\n"
        "except OSError: print(written >> 20)",
        disk_mib=8,
    )
    assert 0 < int(files.output) <= 8
    output = await ended("while True: print('x' * 1000)", output_kib=16)
    assert output.exit_code is None and len(output.output) == 16 << 10 and "more than 16 KiB" in output.stopped
    complaints = await ended("import sys\nfor _ in range(999): sys.stderr.write('x' * 1000)\nprint(1)", output_kib=16)
    assert (complaints.exit_code, complaints.output) == (0, b"1\n")
    late = await ended("import sys\nwhile True: sys.stderr.write('x' * 1000)", output_kib=16, timeout_s=0.3)
    assert "longer than 0.3 s" in late.stopped


@real
async def test_late_programs_are_stopped_and_later_tests_have_failed() -> None:
    started = time.monotonic()
    slow = "import time\nif input() == '2': time.sleep(600)\nprint(1)"
    tests = {"inputs": ["1", "2", "1"], "outputs": ["1", "1", "1"]}
    assert await scored(slow, tests, partial=True, timeout_s=0.5) == pytest.approx(2 / 3)
    assert await scored(slow, tests, partial=True, timeout_s=60, deadline_s=0.5) == pytest.approx(1 / 3)
    assert time.monotonic() - started < 20


def programs() -> set[int]:
    """Processes of any sandbox on this host."""
    return {one.pid for one in psutil.process_iter(["cmdline"]) if "/main.py" in (one.info["cmdline"] or [])}


@real
async def test_a_score_that_is_cancelled_at_any_moment_leaves_no_program() -> None:
    """Also while the sandbox is being made: bwrap alone may then die without the process that it has just forked."""
    before, left_after = programs(), []
    for delay_ms in (0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30):
        running = asyncio.create_task(ended("import os, time; os.fork(); os.setsid(); time.sleep(600)", timeout_s=600))
        await asyncio.sleep(delay_ms / 1000)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        left_after.append(programs() - before)
    async with asyncio.timeout(10):
        while left := programs() - before:  # a killed process is seen until it is reaped
            await asyncio.sleep(0.05)
    assert not left, left_after


@real
async def test_the_probe_passes_here() -> None:
    await Sandbox(CodeReward()).probe()
