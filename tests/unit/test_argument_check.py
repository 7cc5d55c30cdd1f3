"""Arguments are compared with what is installed, for every part and router, and each problem is named where it was written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from physarum.actors import preflight
from physarum.actors.argument_check import check_arguments
from physarum.actors.engine.environment import engine_environment, engine_python
from physarum.actors.engine.schema import SGLANG, _cache_file, _remember, inspect_server
from physarum.configs.loader import resolve

STUB = Path(__file__).resolve().parents[1] / "stub_engine"
SFT = """\
run: {name: sft, root: %s}
model: {path: start}
source: {hook: "calculator:source"}
trainer: {objective: sft, lr: 3e-3}
stop: {steps: 10}
engines:
  "*": {python: %s, env: {PYTHONPATH: %s}}
"""


async def remembering(folder: Path, engines: str) -> tuple[list[str], list[str]]:
    """What is known without starting a process, before and after an engine's arguments were asked for here."""
    (folder / "c.yaml").write_text(SFT % (folder / "runs", sys.executable, STUB) + engines)
    config = resolve(folder / "c.yaml")
    cache = Path(config.run.folder).parent / ".cache"
    before = [str(problem) for problem in preflight.remembered_arguments(config)]
    settings = config.engines["policy"]
    schema = await inspect_server(engine_python(settings), engine_environment("cpu", settings.env), cache)
    python, version = folder / "env" / "bin" / "python", schema.version
    (folder / "env" / "lib" / "python3.12" / "site-packages" / f"sglang-{version}.dist-info").mkdir(parents=True)
    _remember(_cache_file(cache, python, version, SGLANG), schema)
    found = config.model_copy(update={"engines": {"policy": settings.model_copy(update={"python": python})}})
    return before, [str(problem) for problem in preflight.remembered_arguments(found)]


@pytest.mark.timeout(60)
async def test_what_an_earlier_engine_told_is_known_before_anything_starts(tmp_path: Path) -> None:
    """A run was made, started and ended with status 1, and its name was then taken by the wrong configuration."""
    before, after = await remembering(tmp_path, "  policy: {sglang: {mem-fracton-static: 0.5}}\n")
    assert before == []
    assert len(after) == 1 and "did you mean mem-fraction-static?" in after[0]


async def problems(folder: Path, engines: str) -> list[str]:
    (folder / "c.yaml").write_text(SFT % (folder / "runs", sys.executable, STUB) + engines)
    return [str(problem) for problem in await check_arguments(resolve(folder / "c.yaml"))]


@pytest.mark.timeout(60)
async def test_every_place_is_compared_with_the_installed_parser(tmp_path: Path) -> None:
    found = await problems(
        tmp_path,
        """\
  policy:
    sglang: {mem-fraction-static: 0.5}
    servers: [{role: regular, sglang: {mem_fraction_statik: 0.4}}, {sglang: {mem-fraction: 0.4}}]
  other: {sglang: {device: cpu}, start_router: {polici: random}}
  away: {url: "http://h:1"}
""",
    )
    assert len(found) == 3
    assert "c.yaml:10: engines.policy.servers.0.sglang" in found[0]
    assert "did you mean mem-fraction-static?" in found[0]
    assert "servers.1" in found[1] and "mem-fraction" in found[1]
    assert "engines.other.start_router" in found[2] and "did you mean policy?" in found[2]
