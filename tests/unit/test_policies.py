"""Several policies, part by part: names, samples of one's own, admission, floors, folders, accounts, processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from physarum.actors import policies, states
from physarum.actors.account import Issued, Logical, close_account
from physarum.actors.context import RunFolder
from physarum.actors.errors import BadHookResultError
from physarum.actors.model_maker import StartModel, link, read_start_model
from physarum.actors.own_samples import OwnSamples
from physarum.actors.roles import instances
from physarum.actors.rollout.actor import _check_policies
from physarum.actors.source.admission import Sizes
from physarum.actors.source.followers import Followers
from physarum.actors.source.room import Room
from physarum.actors.states import Floor, TrainerDone
from physarum.actors.supervisor import launcher
from physarum.actors.supervisor.launcher import Launcher
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.errors import NotInRunError, RunUnfitError
from physarum.actors.trainer.floors import Floors
from physarum.bus import layout, names
from physarum.bus.ledger import Dropped, LedgerRecord, Numbered, Planned, PlanRecord, RefillRecord, StepRecord
from physarum.bus.records import Execution, Sample, Task, execution_header
from physarum.bus.version import Span
from physarum.configs.bus import BusConfig
from physarum.configs.devices import PresentDevices
from physarum.configs.root import RootConfig

RUN: dict[str, Any] = {
    "run": {"name": "two"},
    "model": {"path": "m"},
    "source": {"hook": "a:b", "group_size": 2},
    "rollout": {"generate": "a:g"},
    "stop": {"steps": 1},
    "engines": {"policy": {}, "solver": {"policy": "solver", "nodes": 2}, "judge": {"model": "j"}},
    "trainer": {"objective": "rl", "lr": 1e-3, "groups_per_batch": 1},
    "age": {"bound": 0},
    "policies": {
        "solver": {
            "model": {"path": "m", "name": "solver"},
            "trainer": {"objective": "rl", "lr": 1e-3, "groups_per_batch": 2, "env": {"OF": "SOLVER"}},
            "age": {"bound": 0},
        }
    },
}
CONFIG = RootConfig.model_validate(RUN, strict=False)


def sample(*labels: str, reward: float | None = None) -> Sample:
    """Two tokens of each version."""
    spans = [Span(label, 2 * number, 2 * number + 2) for number, label in enumerate(labels)]
    count = 2 * len(labels)
    return Sample(
        token_ids=np.arange(count + 1), prompt_len=1, loss_mask=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32), spans=spans, reward=reward,
    )  # fmt: skip


def execution(*samples: Sample) -> Execution:
    task = Task(id="s/0/0/0", run="two", source="s", ordinal=0, group="s/0/0", group_size=1, member=0)
    return Execution(id="x", task=task, samples=list(samples), worker="w", started_at=0.0, finished_at=1.0)


def test_a_runs_own_policy_has_the_names_that_it_had_when_it_was_alone() -> None:
    assert [names.ledger_of(one) for one in ("", "solver")] == ["ledger", "ledger-solver"]
    assert names.stream("two", names.ledger_of("solver")) == "two_LEDGER-SOLVER"
    assert [policies.trainer_instance(one) for one in ("", "solver")] == ["trainer-0", "trainer-solver-0"]
    assert [policies.named("trainer", one) for one in ("", "solver")] == ["trainer", "trainer-solver"]
    assert [policies.key("hold", one) for one in ("", "solver")] == [("hold",), ("hold", "solver")]
    folder = RunFolder(Path("/r"))
    assert (folder.checkpoints, folder.model) == (Path("/r/checkpoints"), Path("/r/model"))
    own = folder.of_policy("solver")
    assert (own.checkpoints, own.start_model) == (
        Path("/r/policies/solver/checkpoints"),
        Path("/r/policies/solver/start_model"),
    )
    assert (own.summary, own.logs, own.weights) == (folder.summary, folder.logs, folder.weights)


def test_each_policy_remembers_where_its_own_start_model_came_from(tmp_path: Path) -> None:
    """A run that is continued keeps the ones that it began with."""
    for name in ("", "solver"):
        folder, model = RunFolder(tmp_path).of_policy(name), tmp_path / f"model-{name}"
        for made in (folder.own, model):
            made.mkdir(parents=True, exist_ok=True)
        link(folder, StartModel("path", str(model)))
    found = [read_start_model(RunFolder(tmp_path).of_policy(name)) for name in ("", "solver")]
    assert [one.folder for one in found if one is not None] == [
        str(tmp_path / "model-"),
        str(tmp_path / "model-solver"),
    ]
    assert RunFolder(tmp_path).of_policy("solver").start_model.resolve() == tmp_path / "model-solver"


def test_the_ledgers_share_the_room_of_one() -> None:
    one, two = (layout.stream_configs("r", BusConfig(), more) for more in ((), ("solver",)))
    sizes = [{stream.name: stream.max_bytes for stream in streams} for streams in (one, two)]
    assert sizes[1].pop("r_LEDGER-SOLVER") == sizes[1]["r_LEDGER"] == (sizes[0]["r_LEDGER"] or 0) // 2
    assert sizes[0] | {"r_LEDGER": sizes[1]["r_LEDGER"]} == sizes[1], "all others are as they were"


def test_every_actor_works_for_the_policy_that_its_name_says() -> None:
    work = {instance: policies.policy_of(CONFIG, role, instance) for role, instance in instances(CONFIG)}
    assert {name for name, policy in work.items() if policy} == {"trainer-solver-0", "solver-0", "solver-0-node-1"}
    assert work["trainer-0"] == work["policy-0"] == work["judge-0"] == ""


def test_a_policys_trainer_has_its_own_variables_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "present_devices", lambda: PresentDevices(2, "two"))
    solver = CONFIG.policies["solver"]
    gpus = solver.model_copy(update={"trainer": solver.trainer.model_copy(update={"gpus": (1,)})})
    made = Launcher(CONFIG.model_copy(update={"policies": {"solver": gpus}}), RunFolder(tmp_path))
    found = made.environment("trainer", "trainer-solver-0")
    assert (found["OF"], found["CUDA_VISIBLE_DEVICES"]) == ("SOLVER", "1")
    assert made.environment("trainer", "trainer-0")["CUDA_VISIBLE_DEVICES"] == ""


def test_headers_and_bodies_are_cut_to_the_same_samples() -> None:
    """Fan-out of both: what is left counts the policy's own rewards, and the numbers of samples are those of the body."""
    made = execution(
        sample("policy@1.0", reward=1.0), sample("solver@2.1", "solver@2.2", reward=0.0), sample("solver@2.2")
    )
    whole = execution_header(made, "d")
    solver = OwnSamples("solver")
    header, body = solver.header(whole), solver.execution(made)
    assert [one.spans for one in header.samples] == [one.spans for one in body.samples]
    assert (len(header.samples), header.reward, header.trainable, whole.reward) == (2, 0.0, 6, 0.5)
    assert OwnSamples(None).header(whole) is whole, "a run of one policy reads all"
    assert OwnSamples("other").header(whole).samples == []


def test_a_sample_of_two_policies_is_refused_with_the_remedy() -> None:
    known = ("policy", "solver")
    _check_policies([sample("policy@1.0"), sample("solver@1.0", "solver@1.1")], known)
    with pytest.raises(BadHookResultError, match=r"sample 1 with tokens of policy and solver.*trajectory of its own"):
        _check_policies([sample("policy@1.0"), sample("policy@1.0", "solver@1.0")], known)
    stranger = sample("judge@1.0")
    with pytest.raises(BadHookResultError, match=r"sample 0 with tokens of judge; expected those of policy or solver"):
        _check_policies([stranger], known)
    stranger.trainable = False
    _check_policies([stranger], known)


def step(plan: int, number: int) -> Numbered:
    record = StepRecord(
        epoch=1, number=number, plan=plan, changed=True, trained=0, masked=0, tokens_trained=0, tokens_masked=0, ages={},
        multi_version_samples=0, reward_mean=None, wait_s=0.0, started_at=0.0, finished_at=0.0,
    )  # fmt: skip
    return Numbered(plan + 1, record)


def plan(sequence: int, trained: list[int], dropped: list[int] | None = None, attempt: int = 0) -> Numbered:
    rows = [Planned(0, f"t{one}", "main", one, attempt, "g", 0.0, 5, 0, []) for one in trained]
    lost = [Dropped(0, f"t{one}", "main", one, attempt, "absent") for one in dropped or []]
    return Numbered(sequence, PlanRecord(epoch=1, at_number=0, executions=rows, dropped=lost))


def test_a_group_is_issued_when_every_policy_has_room() -> None:
    """Batches of 1 and 2 groups, K = 0: the smaller one holds the source until it is done; then the other one may not yet."""
    context: Any = SimpleNamespace(config=CONFIG)
    rooms = [Room(view, Followers(context, "main", policy=view.policy), lambda: None) for view in CONFIG.views()]
    first, solver = rooms

    def open_for(issued: int) -> list[bool]:
        return [room.for_a_group(issued, Sizes(2, 2)) for room in rooms]

    assert open_for(0) == [True, True] and open_for(2) == [False, True]
    for record in (plan(1, [0, 1]), step(1, 1)):
        first.followers._record(record)
    assert open_for(2) == [True, True] and open_for(4) == [False, False]
    for record in (plan(3, [2], dropped=[3]), step(3, 2)):
        first.followers._record(record)
    assert open_for(4) == [True, False], "a batch of the solver's is out: it can train it"
    for record in (plan(1, [0, 1, 2], dropped=[3]), step(1, 1)):
        solver.followers._record(record)
    assert open_for(4) == [True, True]


class Told:
    """The register of the run."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], Floor | TrainerDone] = {}

    async def get(self, *key: str) -> Any:
        return SimpleNamespace(value=self.values.get(key))

    async def put(self, value: Floor, *key: str) -> None:
        self.values[key] = value


async def test_the_log_is_trimmed_below_the_smallest_floor_that_was_told() -> None:
    told = Told()
    first, solver = (Floors(context_of(view, told)) for view in CONFIG.views())
    assert await first.agreed(10) == 1, "nobody knows what the other needs"
    assert await solver.agreed(4) == 4
    assert (await first.agreed(12), await solver.agreed(20)) == (4, 12)
    assert (await first.is_ours(12), await solver.is_ours(20)) == (True, False), "one of them keeps the log full"
    alone = Floors(context_of(CONFIG.model_copy(update={"policies": {}}), told))
    assert await alone.agreed(99) == 99 and await alone.is_ours(99) and len(told.values) == 2, "one alone tells nobody"


async def test_a_policy_that_is_done_keeps_nothing_of_the_log_from_the_others() -> None:
    told = Told()
    first, solver = (Floors(context_of(view, told)) for view in CONFIG.views())
    assert await first.agreed(3) == 1
    assert (await solver.agreed(20), await solver.is_ours(20)) == (3, False)
    told.values[states.TRAINER_DONE,] = TrainerDone("stop.steps = 1", "policy@1.1", 1, "m", 0.0)
    assert (await solver.agreed(20), await solver.is_ours(20)) == (20, True)


def context_of(view: RootConfig, told: Told) -> Any:
    return SimpleNamespace(config=view, policy=view.policy, run_register=lambda kind: told)


def test_an_account_counts_the_refills_that_another_policy_asked_for() -> None:
    refill: LedgerRecord = RefillRecord(source="main", ordinal=1, group="g", member=1, attempt=1)
    asked = [Numbered(1, refill)]
    own = [plan(1, [0], dropped=[2]), step(1, 1), plan(3, [1], attempt=1), step(3, 2)]
    made = close_account({"main": Issued(3, 1)}, own, [Logical("main", 1, 0)], [], asked=asked)
    assert (made.issued, made.trained, made.dead, made.dropped_by_reason) == (4, 2, 1, {"absent": 1}) and made.closes
    assert close_account({"main": Issued(3, 1)}, own, [Logical("main", 1, 0)], []).ahead == 1, (
        "its own ledger asked for none"
    )


def test_commands_find_the_policy_by_its_name_or_by_a_version() -> None:
    run = OpenRun(RunFolder(Path("/r")), CONFIG, cast(Any, None), cast(Any, None), False)
    solver = run.of_policy("solver")
    assert (solver.ledger, solver.folder.policy, solver.config.model.name) == ("ledger-solver", "solver", "solver")
    assert run.of_label("solver@3.1").ledger == "ledger-solver" and run.of_label("policy@3.1").ledger == "ledger"
    assert solver.of_label("1.20").ledger == "ledger-solver" and solver.of_policy("policy").ledger == "ledger"
    with pytest.raises(NotInRunError, match="trains no policy 'solve'; there are: policy, solver"):
        run.of_policy("solve")
    with pytest.raises(RunUnfitError, match=r"trains policy, solver; expected one policy for actorctl fork"):
        run.refuse_several("fork")


def test_records_of_before_have_the_policy_of_their_spans() -> None:
    """Nothing was added to what travels."""
    made = execution(sample("policy@1.0"))
    assert made.samples[0].policy == execution_header(made, "d").samples[0].policy == "policy"
    assert "policy" not in msgspec.structs.asdict(made.samples[0])
