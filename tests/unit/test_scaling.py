"""How many actors there should be: what may be asked for, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors import scaling
from physarum.actors.states import Scaled
from physarum.actors.tools.errors import RunUnfitError
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def config(*settings: str) -> RootConfig:
    return resolve(QUICKSTART, parse_command_line(list(settings)))


def change(found: RootConfig, *texts: str) -> dict[str, scaling.Numbers]:
    return scaling.changed(found, scaling.groups(found), [scaling.parse(text) for text in texts])


def test_without_a_wish_it_is_as_configured() -> None:
    found = config()
    assert scaling.groups(found) == {"rollout": (0, 1), "reward": (0,), "policy": (0,)}
    assert set(scaling.members(found, None)) >= {
        ("engine", "policy-0"),
        ("trainer", "trainer-0"),
        ("rollout", "rollout-1"),
    }


def test_changes_apply_in_order_and_to_each_group_by_any_of_its_names() -> None:
    found = change(config(), "rollout=4", "rollout=-1", "engine=+1", "engines.policy=+1", "reward=0")
    assert found == {"rollout": (0, 1, 2), "reward": (), "policy": (0, 1, 2)}


def test_who_left_in_the_middle_is_the_first_to_come_back() -> None:
    found = config()
    now = scaling.without(found, change(found, "rollout=4"), "rollout-1")
    assert now["rollout"] == (0, 2, 3)
    assert scaling.changed(found, now, [scaling.parse("rollout=+1")])["rollout"] == (0, 1, 2, 3)
    members = scaling.members(found, Scaled({name: list(numbers) for name, numbers in now.items()}, 0.0))
    assert [name for role, name in members if role == "rollout"] == ["rollout-0", "rollout-2", "rollout-3"]
    assert ("trainer", "trainer-0") in members


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["rollout"], "expected GROUP=N"),
        (["rolout=3"], "did you mean rollout"),
        (["trainer=2"], "no group that can be scaled"),
        (["reward=-2"], "reward would have -1 actors"),
        (["rollout=8", "policy=10001"], "expected from 0 to 10000"),
    ],
)
def test_what_cannot_be_is_refused_by_name(texts: list[str], words: str) -> None:
    with pytest.raises(RunUnfitError, match=words):
        change(config(), *texts)


def test_devices_are_not_shared_out_again() -> None:
    found = config("engines.policy.count=2", "engines.policy.gpus=[0,1]")
    assert change(found, "policy=1")["policy"] == (0,)
    with pytest.raises(RunUnfitError, match=r"shared out among 2.*engines.policy.count"):
        change(found, "policy=3")


def test_engines_of_somebody_else_are_not_ours_to_scale() -> None:
    ours = config()
    theirs = ours.engines["policy"].model_copy(update={"url": ("http://127.0.0.1:1",)})
    found = ours.model_copy(update={"engines": {"policy": theirs}})
    assert "policy" not in scaling.groups(found)
    with pytest.raises(RunUnfitError, match="no actor of the run that can leave"):
        scaling.without(found, scaling.groups(found), "policy-0")


@given(st.lists(st.integers(0, 12), max_size=8))
def test_a_group_always_has_as_many_as_was_asked_for_and_none_twice(counts: list[int]) -> None:
    found = config()
    now = scaling.groups(found)
    for count in counts:
        now = scaling.changed(found, now, [scaling.Change("rollout", count, False)])
        assert len(now["rollout"]) == len(set(now["rollout"])) == count


def test_only_the_last_part_of_a_group_is_scaled() -> None:
    found = config("engines.policy.servers=[{role: prefill, count: 2}, {role: decode, count: 2}]")
    assert change(found, "policy=+1")["policy"] == (0, 1, 2, 3, 4)
    assert found.engines["policy"].part_of(4).role == "decode"
    assert change(found, "policy=2")["policy"] == (0, 1)
    with pytest.raises(
        RunUnfitError, match="would have 1 actors; expected at least 2: of engines.policy.servers only the last part"
    ):
        change(found, "policy=1")


def test_the_nodes_of_an_engine_come_and_go_with_it() -> None:
    found = config("engines.policy.nodes=3")
    one = [("engine", "policy-0"), ("node", "policy-0-node-1"), ("node", "policy-0-node-2")]
    assert [member for member in scaling.members(found, None) if member[0] in ("engine", "node")] == one
    scaled = Scaled(groups={"policy": [0, 2]}, at=0.0)
    members = scaling.members(found, scaled)
    assert {name for role, name in members if role == "node"} == {
        "policy-0-node-1", "policy-0-node-2", "policy-2-node-1", "policy-2-node-2",
    }  # fmt: skip
    assert scaling.members(found, Scaled(groups={"policy": []}, at=0.0)) == [
        member for member in members if member[0] not in ("engine", "node")
    ]
