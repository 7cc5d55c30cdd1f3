"""Every machine computes the same places from the same file: each actor on exactly one machine, and none is moved by another
machine that is added behind the others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from physarum.actors.roles import instances
from physarum.configs import placement
from physarum.configs.devices import PresentDevices, assign_devices, device_groups
from physarum.configs.errors import ConfigError
from physarum.configs.loader import digest, dump, resolve
from physarum.configs.machines import HEAD
from physarum.configs.overrides import parse_command_line
from physarum.configs.placement import Slot, dealt, local_slots, machine_names, machine_of, reduced
from physarum.configs.portable import differences, portable, portable_digest
from physarum.configs.root import RootConfig

BASE: dict[str, Any] = {
    "run": {"name": "r"},
    "bus": {"url": "nats://bus:4222"},
    "checkpoint": {"token_env": "TOKEN"},
    "model": {"path": "m"},
    "source": {"hook": "a:b"},
    "rollout": {"generate": "a:b"},
    "reward": {"hook": "a:b"},
    "trainer": {"objective": "rl", "lr": 1e-3},
    "stop": {"steps": 1},
}
GPU = {"count": 3, "engines": {"policy": 2}, "rollout": 4, "reward": 1}


def load(folder: Path, *words: str, **sections: Any) -> RootConfig:
    values = {**BASE, "engines": {"policy": {}}, **sections}
    (folder / "c.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return resolve(folder / "c.yaml", parse_command_line(words))


def places(config: RootConfig) -> dict[str, str]:
    return {instance: machine_of(config, role, instance) for role, instance in instances(config)}


def test_counts_are_the_sums_over_the_machines_and_what_nobody_names_is_the_heads(tmp_path: Path) -> None:
    config = load(tmp_path, machines={"gpu": GPU}, engines={"policy": {}, "judge": {"model": "j", "count": 2}})
    assert (config.engines["policy"].count, config.rollout.count, config.reward.count) == (6, 12, 3)
    assert machine_names(config) == (HEAD, "gpu-0", "gpu-1", "gpu-2")
    found = places(config)
    assert [found[f"policy-{n}"] for n in range(6)] == ["gpu-0", "gpu-0", "gpu-1", "gpu-1", "gpu-2", "gpu-2"]
    assert found["rollout-4"] == found["reward-1"] == "gpu-1"
    heads = ("judge-0", "judge-1", "trainer-0", "source-0", "checkpoint-0", "janitor-0")
    assert {found[name] for name in heads} == {HEAD}
    assert list(config.engines) == ["policy", "judge"], "the first one is the policy's"


def test_a_count_of_null_is_as_if_it_were_not_written(tmp_path: Path) -> None:
    rollout = {**BASE["rollout"], "count": None}
    config = load(tmp_path, machines={"gpu": GPU}, engines={"policy": {"count": None}}, rollout=rollout)
    assert (config.engines["policy"].count, config.rollout.count) == (6, 12)
    with pytest.raises(ConfigError, match=r"rollout\.count"):
        load(tmp_path, machines={"head": {"reward": 1}}, rollout=rollout)


def test_the_configuration_reads_back_as_it_was(tmp_path: Path) -> None:
    config = load(tmp_path, machines={"head": {"rollout": 1}, "gpu": GPU})
    (tmp_path / "again.yaml").write_text(dump(config))
    again = resolve(tmp_path / "again.yaml")
    assert again == config and digest(again) == digest(config)
    assert places(again) == places(config)
    assert places(config)["rollout-0"] == HEAD and places(config)["rollout-1"] == "gpu-0"


MACHINES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=5
)


def made(machines: list[tuple[int, int, int, int]], nodes: int = 1) -> RootConfig:
    """Without the loader, whose counts are tested above."""
    entries = {
        f"m{place}": {"count": count, "engines": {"policy": engines * nodes}, "rollout": rollout, "reward": reward}
        for place, (count, engines, rollout, reward) in enumerate(machines)
    }
    totals = [sum(one[0] * one[place] for one in machines) for place in (1, 2, 3)]
    sections = {
        "machines": entries,
        "engines": {"policy": {"count": max(1, totals[0]), "nodes": nodes}},
        "rollout": {**BASE["rollout"], "count": totals[1]},
        "reward": {**BASE["reward"], "count": totals[2]},
    }
    return RootConfig.model_validate({**BASE, **sections}, strict=False)


@given(MACHINES, st.integers(1, 3))
def test_each_actor_is_on_exactly_one_machine_which_has_as_many_as_it_names(
    machines: list[tuple[int, int, int, int]], nodes: int
) -> None:
    config = made(machines, nodes)
    key = ("rollout",)
    here = {name: local_slots(config, key, name) for name in machine_names(config)}
    every = [slot for slots in here.values() for slot in slots]
    assert sorted(every) == [Slot(number) for number in range(config.rollout.count)]
    counts = Counter(dealt(config, key).values())
    for place, (count, _, rollout, _) in enumerate(machines):
        assert all(counts[f"m{place}-{rank}"] == rollout for rank in range(count))
    found = places(config)
    assert all(found[f"rollout-{slot.number}"] == name for name, slots in here.items() for slot in slots)


@given(MACHINES, st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)))
def test_a_machine_that_is_added_at_the_end_moves_no_actor(
    machines: list[tuple[int, int, int, int]], last: tuple[int, int, int, int]
) -> None:
    before, after = places(made(machines)), places(made([*machines, last]))
    if sum(one[0] * one[1] for one in machines) == 0:  # a group has at least one engine: it was the head's
        del before["policy-0"]
    assert {name: after[name] for name in before} == before


@given(MACHINES, st.integers(0, 200))
def test_an_actor_beyond_those_configured_goes_where_its_group_is(
    machines: list[tuple[int, int, int, int]], number: int
) -> None:
    config = made(machines)
    homes = set(dealt(config, ("rollout",)).values()) or {HEAD}
    assert machine_of(config, "rollout", f"rollout-{number}") in homes
    first = [machine_of(config, "rollout", f"rollout-{config.rollout.count + more}") for more in range(len(homes))]
    assert set(first) == homes, "each of them in turn"


def test_where_actors_beyond_those_configured_are_is_not_dealt_anew_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every supervisor asks at each of their heartbeats: at a thousand machines that was 10 ms of each one's event loop."""
    looked = 0

    class Counted(dict[Slot, str]):
        def items(self) -> Any:
            nonlocal looked
            looked += 1
            return super().items()

    monkeypatch.setattr(placement, "dealt", lambda config, key: Counted(dealt(config, key)))
    config = load(tmp_path, machines={"gpu": {"count": 3, "rollout": 2}})
    looked = 0
    found = [machine_of(config, "rollout", f"rollout-{number}") for number in range(6, 106)]
    assert found[:4] == ["gpu-0", "gpu-1", "gpu-2", "gpu-0"] and looked <= 1


def test_nodes_of_an_engine_are_on_as_many_machines_as_it_takes(tmp_path: Path) -> None:
    engines = {"policy": {"nodes": 2, "weights_folder": "/shared"}}
    apart = load(tmp_path, machines={"gpu": {"count": 4, "engines": {"policy": 1}}}, engines=engines)
    assert apart.engines["policy"].count == 2
    found = places(apart)
    assert (found["policy-0"], found["policy-0-node-1"]) == ("gpu-0", "gpu-1")
    assert (found["policy-1"], found["policy-1-node-1"]) == ("gpu-2", "gpu-3")
    assert (
        machine_of(apart, "engine", "policy-2") == "gpu-0" and machine_of(apart, "node", "policy-2-node-1") == "gpu-1"
    )
    together = places(load(tmp_path, machines={"gpu": {"count": 2, "engines": {"policy": 2}}}, engines=engines))
    assert (together["policy-1"], together["policy-1-node-1"]) == ("gpu-1", "gpu-1")


def test_devices_are_counted_on_each_machine(tmp_path: Path) -> None:
    trainer = {**BASE["trainer"], "gpus": 1}
    config = load(tmp_path, machines={"gpu": GPU}, engines={"policy": {"gpus": 4}}, trainer=trainer)
    present = PresentDevices(4, "four")
    assert assign_devices(config, present, HEAD) == {"trainer": (0,)}
    assert assign_devices(config, present, "gpu-2") == {"engines.policy": (0, 1, 2, 3)}
    assert device_groups(config, "gpu-2")["engines", "policy"].instances == 2
    with pytest.raises(ConfigError, match=r"4 devices \(`engines\.policy\.gpus`\) for 3 instances"):
        load(tmp_path, machines={"gpu": {**GPU, "engines": {"policy": 3}}}, engines={"policy": {"gpus": 4}})


def test_a_machine_checks_the_engines_that_it_has(tmp_path: Path) -> None:
    engines = {"policy": {}, "judge": {"model": "j"}}
    config = load(tmp_path, machines={"gpu": GPU}, engines=engines)
    assert list(reduced(config, "gpu-1").engines) == ["policy"] and list(reduced(config, HEAD).engines) == ["judge"]
    alone = load(tmp_path, engines=engines)
    assert reduced(alone, HEAD) is alone and machine_of(alone, "engine", "policy-7") == HEAD


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bus": ({"bus": {}}, r"`machines` without `bus\.url`; expected a bus that all machines reach"),
    "token": ({"checkpoint": {}}, r"`machines` without `checkpoint\.token_env`"),
    "head": ({"machines": {"head": {"count": 2}, "gpu": GPU}}, r"`machines\.head\.count: 2`; expected one head"),
    "twice": (
        {"machines": {"gpu": GPU, "gpu-1": {"rollout": 1}}},
        r"the machine gpu-1 2 times, of `machines\.gpu` and `machines\.gpu-1`",
    ),
    "zero": ({"machines": {"0": {"rollout": 1}}}, r"a machine called 0"),
    "nothing": ({"machines": {"gpu": GPU, "idle": {}}}, r"`machines\.idle` with nothing to start"),
    "group": ({"machines": {"gpu": {"engines": {"polcy": 1}}}}, r"`machines\.gpu\.engines\.polcy`.*write `policy`"),
    "fewer": (
        {"machines": {"gpu": GPU}, "engines": {"policy": {"count": 7}}},
        r"machines with 6 processes \(engines times nodes\) of `engines\.policy`, which has 7",
    ),
    "odd": (
        {"machines": {"gpu": {"count": 3, "engines": {"policy": 1}}}, "engines": {"policy": {"nodes": 2}}},
        r"machines with 3 processes .* of `engines\.policy`, which has 2",
    ),
    "pairs": (
        {"engines": {"policy": {"servers": [{"role": "prefill"}, {"role": "decode", "count": 5}]}}},
        r"bootstrap ports take no token",
    ),
    "router": ({"engines": {"policy": {"start_router": {}}}}, r"`engines\.policy\.start_router` with `machines`"),
    "url": ({"engines": {"policy": {"url": "http://x:1"}}}, r"`machines` with servers of `engines\.policy\.url`"),
    "folder": (
        {"machines": {"gpu": {"count": 2, "engines": {"policy": 1}}}, "engines": {"policy": {"nodes": 2}}},
        r"on several machines without `weights_folder`",
    ),
    "blobs": ({"blobs": {"access": "folder"}}, r"`machines` with `blobs\.access: folder`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_both_options(tmp_path: Path, name: str) -> None:
    sections, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **{"machines": {"gpu": GPU}, **sections})


def test_machines_may_keep_their_files_elsewhere_and_nothing_else_may_differ(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    engines = {"policy": {"python": "venv/bin/python", "sglang": {"tp-size": 1}}}
    hook = {"rollout": {"generate": "./mine.py:generate"}}
    one = load(tmp_path, machines={"gpu": GPU}, engines=engines, **hook)
    same = load(
        other, "run.root=elsewhere", "bus.url=nats://localhost:4222", machines={"gpu": GPU}, engines=engines, **hook
    )
    assert one != same and portable_digest(one) == portable_digest(same)
    changed = load(other, "trainer.lr=2e-3", machines={"gpu": GPU}, engines=engines, **hook)
    assert portable_digest(one) != portable_digest(changed)
    assert differences(portable(one), portable(changed)) == ["`trainer.lr`"]
    turned = load(other, machines={"gpu": GPU, "cpu": {"rollout": 1}}, engines=engines, **hook)
    back = load(other, machines={"cpu": {"rollout": 1}, "gpu": GPU}, engines=engines, **hook)
    assert portable_digest(turned) != portable_digest(back), "the order decides who is where"
