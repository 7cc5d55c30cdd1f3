"""Bad data and bad hooks in a real run: what is broken is skipped, retried or buried by name; the rest is trained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import bad_input
import pytest
from bad_input import ANSWER, QUESTION, actorctl, configuration, write

pytestmark = pytest.mark.timeout(180)

STEPS = 12
HOOK = """
import time

def score(execution):
    number = execution.task.metadata["number"]
    if number == 1:
        raise ValueError(f"no score for row {number}")
    if number == 2:
        time.sleep(600)
    return "good" if number == 3 else 1.0
"""


def rows() -> str:
    """Lines 3, 5 and 8 are broken; row 4 has nothing to condition on, which only the generate hook can know."""
    lines = [
        json.dumps({"prompt": [ANSWER] if number == 4 else [QUESTION, ANSWER], "metadata": {"number": number}})
        for number in range(16)
    ]
    for line, text in ((3, '{"prompt": ['), (5, "[1, 2]"), (8, '{"promt": 1}')):
        lines.insert(line - 1, text)
    return "\n".join(lines) + "\n"


class Run:
    """The finished run, how it ended and what its logs say."""

    def __init__(self, folder: Path, done: CompletedProcess[str]) -> None:
        self.folder, self.done = folder, done
        self.summary: dict[str, Any] = json.loads(done.stdout)

    def letters(self) -> dict[str, str]:
        """The reason of each dead letter, by the number of its row in the data file (the reason's first words)."""
        logs = bad_input.log_of(self.folder, "rollout-0") + bad_input.log_of(self.folder, "reward-0")
        return dict(re.findall(r"ERROR physarum\.bus\.work: (\S+ #\d+) is dead after 2 deliveries: (.*)", logs))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "rows.jsonl").write_text(rows())
    (folder / "scoring.py").write_text(HOOK)
    values = configuration()
    values["source"] = {"name": "rows", "data": "rows.jsonl", "group_size": 1, "shuffle": False, "epochs": 1}
    values["reward"] = {"hook": "scoring:score", "timeout_s": 0.5}
    values["bus"] |= {"max_deliver": 2}
    values["groups"] = {"refills": 0}
    values["stop"] = {"steps": STEPS}
    write(folder, values)
    try:
        done = actorctl(folder, "up", "run.yaml", "--json", limit_s=120)
        assert done.returncode == 0, done.stderr
        yield Run(folder, done)
    finally:
        bad_input.end_processes_of(folder)


def test_broken_lines_are_named_and_counted_before_the_start(run: Run) -> None:
    for words in (
        "3 broken lines in rows.jsonl",
        "line 3: not JSON",
        "line 5: not a JSON object",
        "line 8: no column `prompt`",
    ):
        assert words in run.done.stderr


def test_broken_lines_are_skipped_by_name(run: Run) -> None:
    skipped = re.findall(r"row skipped: \S*rows\.jsonl:(\d+)", bad_input.log_of(run.folder, "source-0"))
    assert skipped == ["3", "5", "8"]


def test_each_bad_sample_is_retried_then_buried_with_its_reason(run: Run) -> None:
    reasons = sorted(run.letters().values())
    assert len(reasons) == 4, reasons
    for words in (
        "the reward hook raised ValueError: no score for row 1 (",
        "the reward hook did not return within reward.timeout_s = 0.5 s",
        "str; expected a finite number",
        "expected a trained segment behind at least one untrained prompt token",
    ):
        assert any(words in reason for reason in reasons), (words, reasons)
    for instance, count in (("reward-0", 3), ("rollout-0", 1)):
        assert bad_input.log_of(run.folder, instance).count("returned (try 1)") == count


def test_the_run_goes_on_and_its_account_closes(run: Run) -> None:
    """16 good lines were issued: 4 died, 12 were trained."""
    account = run.summary["account"]
    assert run.summary["steps"] == STEPS
    assert (account["trained"], account["dead"], account["imbalance"], account["double_trained"]) == (12, 4, 0, 0)
    assert bad_input.processes_of(run.folder) == []
    assert "Traceback" not in run.done.stderr
