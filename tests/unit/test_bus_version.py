"""Version labels, their order, and ages across rollbacks (protocol: versions, rollback, age)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.bus.errors import RecordError
from physarum.bus.names import RunNameError, check_run, subject
from physarum.bus.version import Fork, Span, Version, age, append_span, effective_number


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_label_parses_to_what_wrote_it(epoch: int, number: int) -> None:
    version = Version("policy", epoch, number)
    assert Version.parse(str(version)) == version


@pytest.mark.parametrize(
    "label",
    ["", "policy", "policy@1", "policy@1.", "policy@1.2\n", "policy@-1.2", "1p@1.2", "policy@1.2.3", "policy@١.٢"],
)
def test_what_is_no_label_is_refused_with_an_example(label: str) -> None:
    with pytest.raises(RecordError, match=r"is not MODEL@EPOCH\.NUMBER \(for example policy@3\.128\)"):
        Version.parse(label)


def test_versions_order_by_epoch_before_number_and_as_numbers() -> None:
    labels = ["policy@1.9", "policy@1.10", "policy@2.3", "policy@10.0"]
    assert sorted((labels[2], labels[0], labels[3], labels[1]), key=Version.parse) == labels


def test_effective_number_by_hand() -> None:
    """Epoch 1 reached 10; epoch 2 resumed at 6 and reached 9; epoch 3 resumed at 8."""
    forks = (Fork(2, 6), Fork(3, 8))
    assert effective_number(Version("p", 1, 4), forks) == 4  # before either fork
    assert effective_number(Version("p", 1, 10), forks) == 6  # shares the history of epoch 2 up to 6 only
    assert effective_number(Version("p", 2, 6), forks) == 6
    assert effective_number(Version("p", 2, 9), forks) == 8
    assert effective_number(Version("p", 3, 9), forks) == 9


def test_a_later_fork_below_an_earlier_one_counts() -> None:
    assert effective_number(Version("p", 1, 10), (Fork(2, 6), Fork(3, 2))) == 2


def test_age_by_hand() -> None:
    forks = (Fork(2, 6),)
    assert age(Version("p", 1, 10), 7, forks) == 1  # label says -3, the weights say 1
    assert age(Version("p", 2, 7), 7, forks) == 0
    assert age(Version("p", 1, 5), 7) == 2


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[Version, tuple[int, ...]]], tuple[Fork, ...], tuple[int, ...], int]:
    """Epochs that train and roll back. Weights are the tuple of the steps they went through, each with its own name."""
    made: list[tuple[Version, tuple[int, ...]]] = []
    forks: list[Fork] = []
    steps: tuple[int, ...] = ()
    name = 0
    for epoch in range(1, draw(st.integers(1, 5)) + 1):
        if epoch > 1:
            at = draw(st.integers(0, len(steps)))
            forks.append(Fork(epoch, at))
            steps = steps[:at]
        made.append((Version("p", epoch, len(steps)), steps))
        for _ in range(draw(st.integers(0, 6))):
            name += 1
            steps = (*steps, name)
            made.append((Version("p", epoch, len(steps)), steps))
    return made, tuple(forks), steps, len(steps)


@given(histories())
def test_age_is_what_the_weights_say_and_never_negative(
    history: tuple[list[tuple[Version, tuple[int, ...]]], tuple[Fork, ...], tuple[int, ...], int],
) -> None:
    """A token is as old as the steps of the current weights that its own weights had not been through."""
    made, forks, current, number = history
    for version, steps in made:
        shared = next(
            (i for i, (a, b) in enumerate(zip(steps, current, strict=False)) if a != b), min(len(steps), number)
        )
        found = age(version, number, forks)
        assert found >= 0
        assert found >= number - shared  # never younger than the weights say
        if version.epoch == len(forks) + 1:
            assert found == number - shared


def test_spans_of_the_same_version_join_and_empty_ones_vanish() -> None:
    spans: list[Span] = []
    for version, count in (("a", 2), ("a", 1), ("b", 0), ("b", 4), ("a", 1)):
        append_span(spans, version, count)
    assert spans == [Span("a", 0, 3), Span("b", 3, 7), Span("a", 7, 8)]


@pytest.mark.parametrize("run", ["", "Run", "a" * 33, "a.b", "a_b", "run\n"])
def test_a_run_id_that_cannot_be_part_of_a_name_is_refused(run: str) -> None:
    with pytest.raises(RunNameError, match="expected 1 to 32 characters"):
        check_run(run)


def test_characters_that_the_bus_reserves_do_not_reach_a_subject() -> None:
    assert subject("r", "tasks", "p1", "math/0/7 *.>") == "ph.r.tasks.p1.math/0/7____"
