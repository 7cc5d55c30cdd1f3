"""`actorctl import-slime` prints what a run's file takes, says what it left out, and refuses with the status of wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from physarum.actors.actorctl import exits
from physarum.actors.actorctl.main import app
from physarum.configs.engine import EngineConfig
from physarum.configs.yaml_file import read_yaml

YAML = """\
sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.8}}
"""
SCRIPT = """\
SGLANG_ARGS=(--rollout-num-gpus-per-engine 1 --sglang-config engines.yaml --router-policy cache_aware)
python3 train.py --colocate ${SGLANG_ARGS[@]}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "engines.yaml").write_text(YAML)
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path


def test_what_it_prints_is_a_groups_configuration(place: Path) -> None:
    done = CliRunner().invoke(app, ["import-slime", str(place / "engines.yaml"), "--sglang-dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    (place / "found.yaml").write_text(done.stdout)
    group = EngineConfig.model_validate(read_yaml(place / "found.yaml").values["engines"]["actor"], strict=False)  # type: ignore[index, call-overload]
    assert group.instances == 4 and group.paired
    assert group.of_server(3).sglang == {"dtype": "bfloat16", "tp-size": 2, "mem-fraction-static": 0.8}


def test_a_script_names_its_file_and_what_is_left_out(place: Path) -> None:
    done = CliRunner().invoke(app, ["import-slime", str(place / "run.sh"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["left_out"] == ["--colocate", "--router-policy"], "pairs are not chosen by a router here"
    assert "start_router" not in found["engines"]["actor"]
    plain = CliRunner().invoke(app, ["import-slime", str(place / "run.sh")])
    assert "left out: --colocate --router-policy" in plain.stderr and "left out" not in plain.stdout


def test_a_refusal_names_the_line_and_ends_with_the_status_of_wrong_usage(place: Path) -> None:
    (place / "engines.yaml").write_text(YAML.replace("overrides", "override"))
    done = CliRunner().invoke(app, ["import-slime", str(place / "engines.yaml")])
    assert done.exit_code == exits.USAGE
    assert "engines.yaml:5" in done.stderr and "did you mean `overrides`" in done.stderr
