"""Actor processes of a benchmark, and what they cost: processor time and memory, their children included."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).parents[2]
_MIB: Final = 1 << 20
_STOP_S: Final = 20.0


def environment() -> dict[str, str]:
    """One thread for each process, and the repository importable, before what is importable already."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextlib.contextmanager
def actors(folder: Path, members: Iterable[tuple[str, str]]) -> Iterator[dict[str, psutil.Process]]:
    """Starts (role, instance) pairs as the supervisor does; by instance. Ended at the end of the block."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for role, instance in members:
            started[instance] = _start(folder, role, instance)
        yield {instance: psutil.Process(process.pid) for instance, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(folder: Path, role: str, instance: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.bench.null_trainer_main", str(folder), role, instance]
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / f"{instance}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
            cwd=ROOT,
            start_new_session=True,
        )


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """User and system seconds so far."""
    return sum(_cpu_s(process) for process in _with_children(processes))


def rss_mib(processes: Iterable[psutil.Process]) -> float:
    """Resident memory now."""
    return sum(process.memory_info().rss for process in _with_children(processes)) / _MIB


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _with_children(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [one for process in processes for one in (process, *process.children(recursive=True))]
