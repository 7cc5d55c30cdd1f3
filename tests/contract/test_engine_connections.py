"""A POST on a connection that SGLang has closed meanwhile fails and is not repeated: ours are gone before SGLang's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from engine_fixture import engine_python

from physarum.actors.engine.environment import engine_environment
from physarum.agents.connections import KEEPALIVE_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
OTHER_SERVERS = {"actors/supervisor/model_fetch.py", "actors/trainer/publication.py", "agents/connections.py"}
"""Model hubs, our own weights service; and the session itself."""
_READ = "from sglang.srt.environ import envs; print('found:', envs.SGLANG_TIMEOUT_KEEP_ALIVE.get())"


def test_our_idle_connections_end_before_those_of_the_installed_release() -> None:
    command = [str(engine_python()), "-c", _READ]
    environment = engine_environment("cpu")
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    found = re.search(r"found: (\d+)", run.stdout)
    assert found is not None, run.stdout
    assert float(found[1]) > KEEPALIVE_TIMEOUT_S


def test_whatever_speaks_with_an_engine_has_such_connections() -> None:
    sources = [path for folder in ("actors", "agents") for path in (ROOT / folder).rglob("*.py")]
    own = {str(path.relative_to(ROOT)) for path in sources if "aiohttp.ClientSession(" in path.read_text()}
    assert own == OTHER_SERVERS
