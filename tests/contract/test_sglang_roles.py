"""What roles and pairs ask of SGLang, against the parser and the request type of the release that is installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from engine_fixture import engine_python

from physarum.actors.engine.arguments import role_arguments, server_command
from physarum.actors.engine.environment import engine_environment
from physarum.actors.engine.nodes import node_arguments
from physarum.actors.engine.schema import inspect_server
from physarum.agents.engine_wire import build_request
from physarum.agents.pairs import Prefill, room_at
from physarum.configs.servers import ServerRole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
ROLES: tuple[ServerRole, ...] = ("regular", "prefill", "decode", "encoder")
_READ = """
import json, sys
from sglang.srt.managers.io_struct import GenerateReqInput
found = GenerateReqInput(**json.loads(sys.argv[1]))
found.normalize_batch_and_arguments()
print("found:" + json.dumps([found.bootstrap_host, found.bootstrap_port, found.bootstrap_room, found.extra_key]))
"""


async def test_the_arguments_of_every_role_are_known(tmp_path: Path) -> None:
    python = engine_python()
    schema = await inspect_server(python, engine_environment("cpu"), tmp_path)
    for role in ROLES:
        own = {**role_arguments(role, 9123), **node_arguments(2, 1, "127.0.0.1:5")}
        words = server_command(python, Path("/m"), 1, "policy@1.0", {}, "cpu", schema, own)
        assert words[words.index("--node-rank") + 1] == "1"
    words = server_command(python, Path("/m"), 1, "p@1.0", {}, "cpu", schema, role_arguments("regular", 9123, True))
    assert "--language-only" in words and words[words.index("--encoder-bootstrap-port") + 1] == "9123"


def test_the_request_of_a_pair_is_read_as_it_is_meant() -> None:
    room = room_at(Prefill(url="http://h:1", instance="p-0", host="h", port=9123))
    body = build_request(np.arange(4, dtype=np.int32), {"max_new_tokens": 4}, "a:1", "policy@1.0", room)
    command = [str(engine_python()), "-c", _READ, body.decode()]
    environment = engine_environment("cpu")
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    line = next(line for line in run.stdout.splitlines() if line.startswith("found:"))
    assert json.loads(line.removeprefix("found:")) == ["h", 9123, room["bootstrap_room"], "policy@1.0"]
