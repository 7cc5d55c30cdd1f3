"""Several policies: what is not written is the run's, each sees the run as its own, and what knows one policy is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from physarum.configs.checks.host import check_ports
from physarum.configs.devices import PresentDevices, assign_devices
from physarum.configs.errors import ConfigError
from physarum.configs.loader import dump, resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig

TWO = """\
run: {name: two}
model: {path: start}
source: {hook: "calculator:source"}
rollout: {generate: "calculator:generate", sampling: {temperature: 0.9, max_new_tokens: 64}}
reward: {hook: "calculator:score"}
engines: {policy: {}, solver: {policy: solver}, judge: {model: frozen}}
trainer: {objective: rl, lr: 1e-4, groups_per_batch: 8, megatron: {hidden_dropout: 0.0}, optimizer_start: {folder: opt}}
age: {bound: 3}
groups: {refills: 2}
policies:
  solver:
    trainer: {lr: 1e-3, megatron: {attention_dropout: 0.0}}
    sampling: {temperature: 0.5}
stop: {steps: 10}
"""


def load(folder: Path, *words: str) -> RootConfig:
    (folder / "c.yaml").write_text(TWO)
    return resolve(folder / "c.yaml", parse_command_line(words))


def test_what_a_policy_does_not_write_is_as_the_run_has_it(tmp_path: Path) -> None:
    config = load(tmp_path)
    solver = config.policies["solver"]
    assert (solver.model.path, solver.model.name) == (tmp_path / "start", "solver")
    assert (solver.trainer.lr, solver.trainer.groups_per_batch, solver.age.bound) == (1e-3, 8, 3)
    assert solver.trainer.megatron == {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    assert solver.trainer.optimizer_start is None, "those are another model's moments"
    assert config.trainer.lr == 1e-4 and config.model.name == "policy"


def test_another_origin_of_the_model_takes_the_place_of_the_runs(tmp_path: Path) -> None:
    solver = load(tmp_path, "policies.solver.model.factory.hook=a:b").policies["solver"]
    assert solver.model.path is None and str(getattr(solver.model.factory, "hook", None)) == "a:b"


def test_a_recorded_configuration_means_what_it_meant(tmp_path: Path) -> None:
    config = load(tmp_path)
    (tmp_path / "recorded.yaml").write_text(dump(config))
    assert resolve(tmp_path / "recorded.yaml") == config


def test_a_policy_sees_the_run_with_its_own_sections(tmp_path: Path) -> None:
    config = load(tmp_path)
    view = config.of_policy("solver")
    assert [one.policy for one in config.views()] == ["", "solver"] and [one.policy for one in view.views()] == [
        "",
        "solver",
    ]
    assert view.of_policy("") is config and (view.policy, view.under) == ("solver", ("policies", "solver"))
    assert (view.model.name, view.trainer.lr, view.trained_temperature) == ("solver", 1e-3, 0.5)
    assert (list(config.following), list(view.following)) == (["policy"], ["solver"])
    assert (config.groups.refills, view.groups.refills) == (2, 0), "one policy asks for refills"
    assert view.source == config.source and view.rollout.slots == config.rollout.slots


def test_a_policy_without_sampling_draws_as_the_run_does(tmp_path: Path) -> None:
    config = load(tmp_path, "policies.solver.sampling=")
    assert config.of_policy("solver").rollout.sampling == config.rollout.sampling


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["engines.solver.policy=solve"], ["`engines.solver.policy: solve`", "one of policy, solver"]),
        (["engines.solver.policy="], ["found no engines that serve solver", "`engines.<group>.policy: solver`"]),
        (["engines.judge.policy=solver"], ["`engines.judge.policy` with `engines.judge.model`"]),
        (["model.name=solver"], ["`policies.solver` beside `model.name: solver`"]),
        (["policies.solver.model.name=other"], ["`policies.solver.model.name: other`", "expected `solver`"]),
        (["policies.solver.trainer.tp=2"], ["policies.solver.trainer.ranks", "ranks divisible by tp * pp * cp"]),
        (["policies.solver.sampling.max_new_tokens=9000"], ["policies.solver.trainer.tokens_per_microbatch"]),
        (["policies.solver.age.streams.gone.bound=1"], ["policies.solver.age.streams.gone", "the name of a source"]),
        (["samples.keep=all"], ["`samples.keep` with `policies`", "`samples.keep: floor`"]),
        (["checkpoint.mirror=s3://b/p"], ["`checkpoint.mirror` with `policies`"]),
        (["checkpoint.versions.mirror=s3://b/p"], ["`checkpoint.versions` with `policies`"]),
        (["machines.other={rollout: 1}"], ["`machines` with `policies`"]),
        (["autoscale={groups: {rollout: {most: 4}}}"], ["`autoscale` with `policies`"]),
        (["engines.policy.transport=nccl"], ["`engines.policy.transport` with `policies`", "`transport: auto`"]),
        (["policies.solver.trainer.objective=sft"], ["`policies.solver.trainer.objective` with `policies`"]),
        (["trainer.ordered=true"], ["`trainer.ordered` with `policies`"]),
        (["trainer.record_only=true"], ["`trainer.record_only` with `policies`"]),
        (
            ["policies.solver.age.in_flight=abort", "policies.solver.age.consumption=drop"],
            ["`policies.solver.age.in_flight` with `policies`", "`continue`"],
        ),
        (["evaluation={hook: 'c:p', engines: solver}"], ["follows the run's own policy; there are: policy"]),
        (["policies.solver.trainer.speed=1"], ["policies.solver.trainer.speed"]),
        (["policies.solver=3"], ["policies.solver", "expected a mapping"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, words: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *words)
    for part in parts:
        assert part in str(caught.value)


def test_the_trainers_of_all_policies_have_devices_and_ports_of_their_own(tmp_path: Path) -> None:
    config = load(tmp_path, "trainer.gpus=1", "policies.solver.trainer.gpus=[0]", "engines.policy.gpus=1")
    assert assign_devices(config, PresentDevices(3, "three")) == {
        "trainer": (1,), "policies.solver.trainer": (0,), "engines.policy": (2,),
    }  # fmt: skip
    both = load(tmp_path, "trainer.master_port=45001")
    found = [problem.found for problem in check_ports(both)]
    assert found == ["port 45001 at `trainer.master_port` and at `policies.solver.trainer.master_port`"]
