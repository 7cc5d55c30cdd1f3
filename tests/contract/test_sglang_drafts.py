"""What docs/weights.md says of engines that draft, of the installed SGLang: who is updated, and what a draft's loader takes."""

from __future__ import annotations

import json
import subprocess

import pytest
from engine_fixture import ROOT, engine_python

from physarum.actors.engine.environment import engine_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_versions_reach_draft_models_and_one_of_its_own_must_be_left_out() -> None:
    command = [str(engine_python()), str(ROOT / "tests" / "draft_updates.py")]
    out = subprocess.run(command, env=engine_environment("cpu"), stdout=subprocess.PIPE, timeout=180, check=True).stdout
    found = json.loads(next(line for line in out.splitlines() if line.startswith(b'{"disk"')))
    assert found["disk"] == ["target", "draft"]
    assert found["selectors"] == {"all": ["target", "draft"], "target": ["target"]}
    assert found["eagle3"] == ["model.layers.0.input_layernorm.weight"], "the target's layer becomes the draft's"
    assert found["mtp of the target"] == [], "the target's layers are not the draft's"
    assert found["mtp of its own"] == ["model.mtp_block.input_layernorm.weight"]
