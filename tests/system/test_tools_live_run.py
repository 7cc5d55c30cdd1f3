"""The tools on a run at work: a checkpoint now, and a dead letter that is retried and trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tools_run import Runs

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ROW = "demos/0/3/0"


@pytest.fixture
def runs(tmp_path: object) -> Iterator[Runs]:
    made = Runs(tmp_path)  # type: ignore[arg-type]
    (made.folder / "broken").touch()
    settings = (
        f"rollout.args.broken={made.folder}/broken", "source.epochs=null", "source.args={count: 1000000}",
        "stop.steps=1000000", "trainer.checkpoint_every=1000000", "trainer.export_every=null", "age.admission=count",
    )  # fmt: skip
    try:
        done = made.up("up", "-d", "small.yaml", *settings)
        assert done.returncode == 0, done.stderr
        yield made
    finally:
        made.actorctl("down", "--now")
        made.end()


def test_a_dead_task_is_retried_trained_and_accounted_and_a_checkpoint_saved_on_demand(runs: Runs) -> None:
    [letter] = runs.until(lambda: runs.json("dead", "ls", "small")["letters"])
    assert (letter["task"], letter["state"]) == (ROW, "dead")
    assert "the calculator is broken" in letter["reason"]
    shown = runs.json("dead", "show", "small", str(letter["id"]))
    assert (shown["record"]["ordinal"], shown["stream"]) == (3, "TASKS")
    assert runs.json("ledger", "small", "--sample", ROW)["state"] == "dead"
    runs.until(lambda: runs.actorctl("ledger", "small", "--step", "1").returncode == 0)

    saved = runs.json("checkpoints", "save", "small")
    assert saved["number"] >= 1
    assert [one["name"] for one in runs.json("checkpoints", "verify", "small")["checkpoints"]] == [saved["folder"]]

    (runs.folder / "broken").unlink()
    assert runs.json("dead", "retry", "small", str(letter["id"])) == {"retried": [letter["id"]]}
    assert runs.json("dead", "ls", "small") == {"letters": []}
    assert [one["state"] for one in runs.json("dead", "ls", "small", "--all")["letters"]] == ["retried"]
    found = runs.until(lambda: (view := runs.json("ledger", "small", "--sample", ROW))["state"] == "trained" and view)
    assert found["reason"] is None
    account = runs.json("ledger", "small")
    assert (account["dead"], account["imbalance"], account["double_trained"]) == (0, 0, 0)
    refused = runs.actorctl("dead", "drop", "small", str(letter["id"]))
    assert refused.returncode == 2
    assert "was retried already" in refused.stderr
