"""An engine that cannot start ends the run: its own last log lines are shown, and nothing is left running."""

from __future__ import annotations

from pathlib import Path

import bad_input
import pytest
from bad_input import actorctl, configuration, write
from engine_fixture import engine_python

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"context-length": 99_999_999}, ("context_length (99999999) is greater than the derived",)),
        ({"context-lenght": 512}, ("has no argument context-lenght", "did you mean context-length")),
    ],
    ids=["value", "argument"],
)
def test_an_engine_that_dies_at_start_shows_its_last_lines(
    tmp_path: Path, arguments: dict[str, int], words: tuple[str, ...]
) -> None:
    values = configuration()
    values["source"] = {"hook": "physarum.agents.calculator.problems:Problems", "group_size": 2}
    values["rollout"] = {"generate": "physarum.agents.calculator.episode:generate", "slots": 2}
    values["reward"] = {"hook": "physarum.agents.calculator.reward:exact_match"}
    values["engines"] = {"policy": {"python": str(engine_python()), "sglang": arguments}}
    values["trainer"] |= {"objective": "rl", "tokens_per_microbatch": 100_000_000}
    write(tmp_path, values)
    try:
        done = actorctl(tmp_path, "up", "run.yaml", limit_s=300)
        text = done.stdout + done.stderr
        assert done.returncode == 1, text
        assert text.count("\nerror: the actor engine/policy-0 ended with status") == 1, text
        for expected in (*words, "Its last lines in runs/bad/logs/policy-0.log", "Remedy: correct what they name"):
            assert expected in text, text
        assert "lives but has been silent" not in text
        assert bad_input.processes_of(tmp_path) == []
    finally:
        bad_input.end_processes_of(tmp_path)
