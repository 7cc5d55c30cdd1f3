"""The environment variables of an engine's process.

Invariant: the engine's Python sees its own packages and never ours, nor any secret of this process; the CPU stand-ins
are on its path only where there is no CUDA device.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from physarum.configs.engine import EngineConfig

Device = Literal["cpu", "cuda"]

CPU_SHIM: Final = Path(__file__).parent / "cpu_shim"

_OTHER_PYTHON: Final = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"})
_SECRET: Final = re.compile(r"TOKEN$|SECRET|PASSWORD|_KEY$|CREDENTIAL", re.IGNORECASE)

# Models are local folders by the time an engine starts: no look-up may leave the host.
_ALWAYS: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
# One OpenMP thread: on few cores, threads that spin cost 10 to 40 times the throughput (measured on two).
_CPU_ONLY: Final[Mapping[str, str]] = {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}


def detect_device(base: Mapping[str, str] = os.environ) -> Device:
    """`cuda` when the driver's control device is there and not hidden by CUDA_VISIBLE_DEVICES. Imports no torch."""
    hidden = base.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def engine_environment(
    device: Device, user: Mapping[str, str] | None = None, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """`base` without other Pythons and secrets, then our settings, then `user`, which wins."""
    inherited = {name: value for name, value in base.items() if name not in _OTHER_PYTHON and not _SECRET.search(name)}
    environment = {**inherited, **_ALWAYS}
    if device == "cpu":
        environment |= _CPU_ONLY
    environment |= dict(user or {})
    if device == "cpu":
        behind = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{CPU_SHIM}{os.pathsep}{behind}" if behind else str(CPU_SHIM)
    return environment


def engine_python(settings: EngineConfig) -> Path:
    """The configured interpreter, else .venv-engine beside this environment, else this one."""
    if settings.python is not None:
        return settings.python
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    return beside if beside.exists() else Path(sys.executable)


def installed_in(python: Path, package: str) -> str | None:
    """The version of a package in a Python's own environment, without starting it; "" where it is not installed, None where
    that environment cannot be looked into."""
    folders = list(python.parent.parent.glob("lib/python*/site-packages"))
    pattern = f"{package.replace('-', '_')}-*.dist-info"
    found = [info.name.removesuffix(".dist-info") for folder in folders for info in folder.glob(pattern)]
    return None if not folders else (found or [""])[0].partition("-")[2]
