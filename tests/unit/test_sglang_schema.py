"""The argument list is asked of the installed server once per release, and a Python without one is named."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from physarum.actors.engine.errors import EngineInspectionError
from physarum.actors.engine.schema import Argument, inspect_server

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

# Stands in for an interpreter with sglang; each question is written to a file of its own.
FAKE = """#!/bin/sh
echo asked >> "$(dirname "$0")/questions"
case "$2" in
  *importlib.metadata*) echo "$FAKE_VERSION" ;;
  *) echo noise; cat "$(dirname "$0")/told" ;;
esac
"""


def fake_python(tmp_path: Path) -> Path:
    arguments = '[{"flags": ["--dtype"], "number": 1, "choices": ["auto"]}]'
    (tmp_path / "told").write_text(f'physarum-schema:{{"arguments": {arguments}, "sampling": ["top_p"]}}\n')
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    return python


def questions(tmp_path: Path) -> int:
    return len((tmp_path / "questions").read_text().splitlines())


async def test_schema_is_remembered_per_release(tmp_path: Path) -> None:
    python, cache = fake_python(tmp_path), tmp_path / "cache"
    first = await inspect_server(python, {"FAKE_VERSION": "1.0"}, cache)
    assert first.version == "1.0" and first.by_name() == {"dtype": Argument(["--dtype"], 1, ["auto"])}
    assert first.sampling == ["top_p"]
    assert questions(tmp_path) == 2
    assert await inspect_server(python, {"FAKE_VERSION": "1.0"}, cache) == first
    assert questions(tmp_path) == 3
    assert (await inspect_server(python, {"FAKE_VERSION": "1.1"}, cache)).version == "1.1"
    assert questions(tmp_path) == 5


async def test_broken_cache_is_written_anew(tmp_path: Path) -> None:
    python, cache = fake_python(tmp_path), tmp_path / "cache"
    first = await inspect_server(python, {"FAKE_VERSION": "1.0"}, cache)
    (file,) = cache.iterdir()
    file.write_text("{")
    assert await inspect_server(python, {"FAKE_VERSION": "1.0"}, cache) == first


async def test_python_without_sglang_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(
        EngineInspectionError, match=r"(?s)install sglang there or set engines\.<group>\.python.*NotFound"
    ):
        await inspect_server(bare, dict(os.environ), tmp_path)
    with pytest.raises(EngineInspectionError, match="cannot be run"):
        await inspect_server(tmp_path / "absent", {}, tmp_path)


async def test_python_that_hangs_is_given_up(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(EngineInspectionError, match=r"within 0\.2 s"):
        await inspect_server(slow, {"PATH": os.environ["PATH"]}, tmp_path, timeout_s=0.2)
