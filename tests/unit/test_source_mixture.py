"""Mixtures: shares exact to within one row wherever they are cut, every part's rows once an epoch, any position the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from physarum.actors.source.cursor import RowCursor
from physarum.actors.source.errors import EpochEndError, UnusableSourceError
from physarum.actors.source.mixture import MixturePartRows, MixtureRows, Schedule
from physarum.actors.source.opening import open_source
from physarum.configs.checks.data import check_data
from physarum.configs.data_files import RowError
from physarum.configs.errors import ConfigError
from physarum.configs.loader import resolve
from physarum.configs.source import MixturePart, SourceConfig, whole_weights


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_every_prefix_has_each_share_to_within_one_row(weights: list[int]) -> None:
    schedule, total = Schedule(weights), sum(weights)
    given_to = [0] * len(weights)
    for place in range(2 * total + 3):
        part, number = schedule.at(place)
        assert number == given_to[part], "a part's rows come in their order"
        given_to[part] += 1
        assert all(
            abs(total * got - (place + 1) * weight) < total for got, weight in zip(given_to, weights, strict=True)
        )


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.7, 0.3], [7, 3]), ([1.0, 1.0], [1, 1]), ([2.5, 1.0], [5, 2]), ([1e-4, 1.0], [1, 10000]), ([3.0], [1])],
)
def test_weights_mean_what_is_written(weights: list[float], whole: list[int]) -> None:
    parts = tuple(MixturePart(name=f"p{at}", data=("x",), weight=weight) for at, weight in enumerate(weights))
    assert whole_weights(parts) == whole


class Counted:
    """`size` rows; those in `broken` are."""

    def __init__(self, size: int, broken: tuple[int, ...] = ()) -> None:
        self._size, self._broken = size, broken

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        if index >= self._size:
            raise EpochEndError(self._size)
        if index in self._broken:
            raise RowError(f"row {index}: no `prompt`")
        return {"prompt": (epoch, index)}


def mixture(**parts: tuple[Counted, int]) -> MixtureRows:
    made = [MixturePartRows(name, rows) for name, (rows, _) in parts.items()]
    return MixtureRows(made, [weight for _, weight in parts.values()])


def test_each_part_goes_through_epochs_of_its_own() -> None:
    rows = mixture(small=(Counted(3), 1), large=(Counted(50), 3))
    found = [rows.row(0, place) for place in range(40)]
    small = [row["prompt"] for row in found if row["metadata"]["mixture"] == "small"]
    assert small == [(number // 3, number % 3) for number in range(10)]
    assert [row["prompt"] for row in found if row["metadata"]["mixture"] == "large"] == [
        (0, number) for number in range(30)
    ]
    for place in (39, 17, 3):  # whoever starts there knows no epoch's length
        assert mixture(small=(Counted(3), 1), large=(Counted(50), 3)).row(0, place) == found[place]


def test_broken_rows_name_their_part_and_leave_the_shares_of_places() -> None:
    cursor = RowCursor(mixture(a=(Counted(4, (1, 2)), 1), b=(Counted(4), 1)), 0, 0, None)
    names = [picked.row["metadata"]["mixture"] for _ in range(24) if (picked := cursor.take())]
    assert Counter(names) == {"a": 8, "b": 16}
    assert cursor.broken == 8
    with pytest.raises(RowError, match="mixture part a: row 1: no `prompt`"):
        mixture(a=(Counted(4, (1,)), 1)).row(0, 1)


@pytest.mark.parametrize(
    ("part", "message"), [(Counted(0), "a holds no row"), (Counted(2, (0, 1)), "a: an epoch without one")]
)
def test_a_part_without_a_usable_row_ends_the_source_instead_of_turning_for_ever(part: Counted, message: str) -> None:
    cursor = RowCursor(mixture(a=(part, 1), b=(Counted(9), 1)), 0, 0, None)
    with pytest.raises(UnusableSourceError, match=f"mixture part {message}"):
        list(iter(cursor.take, None))


def recipe(folder: Path, mixture: list[dict[str, Any]], **more: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"run: {{name: r}}\nmodel: {{path: m}}\nsource: {json.dumps({'mixture': mixture, **more})}\n"
        "trainer: {objective: sft, lr: 1.0}\nstop: {steps: 1}\n"
    )
    return path


def test_files_of_two_forms_mix_under_columns_and_chat_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"a{n}"}) + "\n" for n in range(6)))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"question": f"b{n}"}) + "\n" for n in range(4)))
    parts = [
        {"name": "a", "data": "a.jsonl", "weight": 2, "metadata": {"level": 1}},
        {"name": "b", "data": "b.jsonl[1:]", "columns": {"prompt": "question"}, "chat": {"system_prompt": "own"}},
    ]
    config = resolve(recipe(tmp_path, parts, chat={"system_prompt": "common"}))
    assert list(check_data(config)) == []
    rows = open_source(config.source, 0)
    found = [rows.row(0, place) for place in range(18)]
    assert Counter(row["metadata"]["mixture"] for row in found) == {"a": 12, "b": 6}
    assert Counter(row["prompt"] for row in found) == {
        **{f"a{n}": 2 for n in range(6)},
        **{f"b{n}": 2 for n in (1, 2, 3)},
    }
    by_part = {row["metadata"]["mixture"]: row["metadata"] for row in found}
    assert by_part["a"]["level"] == 1
    assert (by_part["a"]["chat"]["system_prompt"], by_part["b"]["chat"]["system_prompt"]) == ("common", "own")
    again = open_source(config.source, 0)
    assert [again.row(0, place) for place in (17, 4)] == [found[17], found[4]]
    assert open_source(config.source, 1).row(0, 0) != found[0] or open_source(config.source, 1).row(0, 1) != found[1]


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        ([], {}, "expected at least one part"),
        ([{"name": "a"}], {}, "expected exactly one of `hook`, `data`, `environment`"),
        ([{"name": "a", "data": "x"}, {"name": "a", "data": "y"}], {}, "found 'a' twice"),
        ([{"name": "a", "data": "x", "weight": 0}], {}, "greater than 0|above 0"),
        (
            [{"name": "a", "data": "x", "weight": 1e-7}, {"name": "b", "data": "y"}],
            {},
            "which repeat after 10000001 rows",
        ),
        ([{"name": "a", "data": "x"}], {"data": "y"}, "found `data` and `mixture`"),
        ([{"name": "a", "data": "x"}], {"epochs": 2}, "`source.epochs: 2` with `source.mixture`"),
    ],
)
def test_what_is_no_mixture_is_refused(
    tmp_path: Path, parts: list[dict[str, Any]], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(recipe(tmp_path, parts, **more))


def test_a_source_without_mixture_is_one_part() -> None:
    source = SourceConfig(data=("x",))
    assert source.parts() == [((), source)]
