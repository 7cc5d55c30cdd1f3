"""Which executions of a file are taken, under which ordinals, group sizes and versions."""

from __future__ import annotations

import numpy as np

from physarum.actors.tools.exported import Row
from physarum.actors.tools.importing import Relabel, adapted, choose
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import Span


def row(sequence: int, group: int, member: int, *, size: int = 4, attempt: int = 0, task_class: str = "p1") -> Row:
    task = Task(
        id=f"main/0/{group}/{member}", run="old", source="main", ordinal=group * size + member, group=f"main/0/{group}",
        group_size=size, member=member, attempt=attempt, task_class=task_class, metadata={"level": 1},
    )  # type: ignore[arg-type]  # fmt: skip
    sample = Sample(
        token_ids=np.arange(3, dtype=np.int32),
        prompt_len=1,
        loss_mask=np.ones(2, bool),
        logprobs=np.zeros(2, np.float32),
        spans=[Span("policy@1.7", 0, 2)],
    )
    execution = Execution(id=f"x{sequence}", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=1.0)
    return Row(sequence=sequence, execution=execution)


def test_ordinals_are_dense_in_the_order_of_the_log_and_groups_are_as_large_as_what_is_there() -> None:
    choice = choose([row(11, 3, 0), row(12, 5, 2), row(13, 3, 2), row(14, 5, 1), row(15, 3, 1)])
    assert choice.taken == {11: (0, 3), 12: (1, 2), 13: (2, 3), 14: (3, 2), 15: (4, 3)}
    assert (choice.fed.executions, choice.fed.groups) == (5, 2)


def test_the_first_execution_of_a_member_counts_and_evaluation_is_left_out() -> None:
    choice = choose([row(1, 0, 0), row(2, 0, 1), row(3, 0, 1, attempt=1), row(4, 9, 0, task_class="eval")])
    assert set(choice.taken) == {1, 2}
    assert (choice.fed.duplicates, choice.fed.evaluation) == (1, 1)


def test_a_single_member_of_a_larger_group_is_left_out_and_counted() -> None:
    choice = choose([row(1, 0, 0), row(2, 1, 0, size=1)])
    assert choice.taken == {2: (0, 1)}
    assert choice.fed.alone == 1


def test_versions_keep_their_number_in_the_history_that_survived() -> None:
    """A takeover in epoch 2 resumed at 5: what epoch 1 made at 7 shares with the surviving weights only up to 5."""
    along = Relabel([(1, 0), (2, 5)], own_history=False)
    assert [along.label(label) for label in ("policy@1.3", "policy@1.7", "policy@2.7")] == [
        "policy@1.3",
        "policy@1.5",
        "policy@2.7",
    ]


def test_in_a_run_with_a_history_of_its_own_foreign_tokens_are_as_old_as_can_be() -> None:
    assert Relabel([(1, 0)], own_history=True).label("policy@3.40") == "policy@0.0"


def test_an_imported_task_says_where_it_came_from() -> None:
    relabel = Relabel([(1, 0)], own_history=False)
    made = adapted(row(11, 3, 1), "new", "import-1", (4, 2), relabel, "old", rename=True)
    task = made.task
    assert (task.id, task.group, task.run, task.source) == (
        "import-1:main/0/3/1",
        "import-1:main/0/3",
        "new",
        "import-1",
    )
    assert (task.ordinal, task.group_size, task.attempt) == (4, 2, 0)
    assert task.metadata == {"level": 1, "imported": {"run": "old", "task": "main/0/3/1", "sequence": 11}}
    assert made.samples[0].spans == [Span("policy@1.7", 0, 2)]
