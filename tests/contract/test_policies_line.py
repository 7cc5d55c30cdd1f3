"""Two policies in the whole line: each trains exactly its own samples, whatever becomes of the other's trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from actor_fixture import eventually, running
from bus_fixture import DEADLINE_S, small_config
from fault_hooks import SOLVERS, plays
from fault_line import HOOKS, LINE, ChainedTrainer, Line, check, context, finished, line

from physarum.actors import states
from physarum.actors.account import Account, accounts
from physarum.actors.states import Floor
from physarum.actors.tools.access import OpenRun
from physarum.actors.tools.rolling_back import release, roll_back
from physarum.actors.tools.saved import durables
from physarum.actors.trainer.log_space import LogSpace
from physarum.actors.trainer.offers import Offers
from physarum.bus import layout, ledger, log, names
from physarum.bus.connection import Bus
from physarum.bus.ledger import GroupClosedRecord, RefillRecord, RollbackRecord, StepRecord
from physarum.bus.log import LogReader
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.loader import resolve

pytestmark = pytest.mark.timeout(60)

SOLVER, IDLE = "solver", "idle"
BOTH = (*LINE, f"trainer-{SOLVER}")
OPTIONS = (
    "trainer.objective=rl", "engines.policy={}", "engines.solver={policy: solver}", f"rollout.generate={HOOKS}:two_policies",
    f"reward.hook={HOOKS}:no_reward", "age.consumption=train", "policies.solver={trainer: {groups_per_batch: 3}}",
    "rollout.sampling.max_new_tokens=8",
)  # fmt: skip
TASKS = 40


@pytest_asyncio.fixture
async def two(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bus]:
    """The streams of a run with both policies, and a third. No engine runs, so nothing is published."""
    monkeypatch.setattr(Offers, "wanted", property(lambda offers: False))
    await bus.api(f"STREAM.DELETE.{names.stream(bus.run, 'ledger')}")
    await layout.create(bus, small_config(), [SOLVER, IDLE])
    yield bus
    for policy in (SOLVER, IDLE):
        await bus.api(f"STREAM.DELETE.{names.stream(bus.run, names.ledger_of(policy))}")


def own(policy: str, tasks: int = TASKS) -> Counter[tuple[int, int]]:
    return Counter((ordinal, 0) for ordinal in range(tasks) if plays(policy, ordinal))


async def both_done(run: Line) -> tuple[Account, Account]:
    """Of the run's own policy, and of the solver, checked to be of just their own samples."""
    await finished(run.bus, run.publisher, DEADLINE_S)
    await finished(run.bus, run.publisher, DEADLINE_S, SOLVER)
    first = await check(run.bus, run.folder, own("policy"))
    return first, await check(run.bus, run.folder, own(SOLVER), SOLVER, SOLVERS)


async def test_each_policy_trains_its_own_samples_and_drops_the_others_by_name(
    tmp_path: Path, two: Bus, publisher: Publisher
) -> None:
    async with line(tmp_path, two, publisher, *OPTIONS, "checkpoint.keep_last=1", roles=BOTH) as run:
        first, solver = await both_done(run)
        heads = [(await ledger.read(two, key=names.ledger_of(one)))[-1].record for one in ("", SOLVER)]
    for account, name in ((first, "policy"), (solver, SOLVER)):
        absent = TASKS - own(name).total()
        assert (account.issued, account.dropped_by_reason) == (TASKS, {"absent": absent})
        assert (account.in_flight, account.imbalance, account.duplicates) == (0, 0, 0)
    assert all(isinstance(head, ledger.DurableRecord) for head in heads), "each made its own checkpoint"
    floors = Register(two, publisher, "run", Floor)
    told = [(await floors.get(states.FLOOR, name)).value for name in ("policy", SOLVER)]
    assert [one.sequence for one in told if one is not None] == [TASKS + 1] * 2
    assert (await log.state(two, "samples")).messages == 0, "below the smallest floor nothing is kept"


async def steps(bus: Bus, policy: str, count: int) -> int:
    """Waits until a policy's ledger has so many steps; the sequence of the last one."""
    reader, found = LogReader(bus, names.ledger_of(policy)), 0
    async with asyncio.timeout(DEADLINE_S), aclosing(reader.batches(1.0)) as batches:
        async for batch in batches:
            for entry in batch:
                found += isinstance(ledger.decode_entry(entry).record, StepRecord)
                if found == count:
                    return entry.sequence
    raise AssertionError("a log ends only with its reader")


@pytest.mark.parametrize(
    "victim", [pytest.param("", marks=pytest.mark.slow), SOLVER], ids=["the run's own", "the further one"]
)
async def test_the_trainer_of_one_policy_dies_and_the_other_goes_on(
    tmp_path: Path, two: Bus, publisher: Publisher, victim: str
) -> None:
    """No checkpoint covers the victim's steps: its successor trains them again, and nobody notices in the other's ledger."""
    role = "trainer" if not victim else f"trainer-{victim}"
    rest = [one for one in BOTH if one != role]
    slow = "trainer.checkpoint_every=100"
    async with line(tmp_path, two, publisher, *OPTIONS, slow, "rollout.args.seconds=0.05", roles=rest) as run:
        dying = ChainedTrainer(context(run.folder, two, publisher, role))
        work = asyncio.create_task(dying.run())
        await steps(two, victim, 2)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        other = SOLVER if not victim else ""
        async with running(ChainedTrainer(context(run.folder, two, await Publisher(two).start(), role))):
            accounts_of_both = await both_done(run)
        takeovers = {
            name: sum(
                isinstance(item.record, RollbackRecord) for item in await ledger.read(two, key=names.ledger_of(name))
            )
            for name in (victim, other)
        }
    assert takeovers == {victim: 2, other: 1}
    assert all(one.closes and one.in_flight == 0 for one in accounts_of_both)


async def test_a_refill_is_asked_for_by_the_runs_own_policy_alone(
    tmp_path: Path, two: Bus, publisher: Publisher
) -> None:
    """Both members of row 1 die once. The other policy's group has gone on without them by then, or takes them: by name."""
    dies = ["source.args.habits.1=die-first", "bus.max_deliver=1"]
    async with line(tmp_path, two, publisher, *OPTIONS, *dies, roles=BOTH):
        await finished(two, publisher, DEADLINE_S)
        await finished(two, publisher, DEADLINE_S, SOLVER)
        found = await accounts(two, [SOLVER])
        asked = [
            [item for item in await ledger.read(two, key=names.ledger_of(one)) if isinstance(item.record, RefillRecord)]
            for one in ("", SOLVER)
        ]
    assert [len(one) for one in asked] == [2, 0]
    for account in found.values():
        assert (account.issued, account.dead, account.in_flight, account.imbalance) == (TASKS + 2, 2, 0, 0)
        assert account.dropped_by_reason.keys() <= {"absent", "late"}
    assert found[""].dropped_by_reason.keys() == {"absent"}


async def test_the_runs_own_policy_ends_the_run_for_the_others(tmp_path: Path, two: Bus, publisher: Publisher) -> None:
    """`stop.steps` counts its steps. The solver's larger batches make fewer, and it ends with those it has."""
    endless = ["source.epochs=null", "stop.steps=6"]
    async with line(tmp_path, two, publisher, *OPTIONS, *endless, roles=BOTH) as run:
        first = await finished(two, publisher, DEADLINE_S)
        other = await finished(two, publisher, DEADLINE_S, SOLVER)
        found = await accounts(two, [SOLVER])
    assert (first.steps, first.reason) == (6, "stop.steps = 6")
    assert 0 < other.steps < 6 and other.reason == "the run's own policy is done: stop.steps = 6"
    assert all(one.closes for one in found.values())
    assert run.folder.of_policy(SOLVER).model != run.folder.model and run.folder.of_policy(SOLVER).model.is_dir()


async def test_a_log_that_one_policy_keeps_full_is_waited_for_by_the_other(
    tmp_path: Path, two: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The solver's trainer is away. The other one neither closes groups nor ends by name: what room there is to be made is the
    solver's to make, and when it is there again everything is trained."""
    await small_samples(two)
    looked: list[bool] = []
    wanted = LogSpace.wanted

    async def counted(space: LogSpace) -> bool:
        found = await wanted(space)
        looked.append(space._asked)
        return found

    monkeypatch.setattr(LogSpace, "wanted", counted)
    large = ["rollout.args.padding=2000", "age.admission=free", "trainer.checkpoint_every=1", "checkpoint.keep_last=1"]
    async with line(tmp_path, two, publisher, *OPTIONS, *large, roles=LINE) as run:
        await eventually(lambda: sum(looked) > 5)  # it was told that the log is full, found it so, and let it be
        before = await ledger.read(two)
        async with running(ChainedTrainer(context(run.folder, two, await Publisher(two).start(), f"trainer-{SOLVER}"))):
            both = await both_done(run)
    assert not any(isinstance(item.record, GroupClosedRecord) for item in before)
    assert all(one.closes and one.dropped_by_reason.keys() == {"absent"} for one in both)


async def test_a_log_full_of_what_the_runs_own_policy_left_when_it_was_done_is_emptied_by_the_others(
    tmp_path: Path, two: Bus, publisher: Publisher
) -> None:
    """The source has ended, so the solver trains all that was issued: more than the log holds. The other needs none of it."""
    await small_samples(two)
    large = ["rollout.args.padding=2000", "age.admission=free", "stop.steps=2", "trainer.checkpoint_every=1"]
    async with line(tmp_path, two, publisher, *OPTIONS, *large, roles=BOTH):
        first = await finished(two, publisher, DEADLINE_S)
        other = await finished(two, publisher, DEADLINE_S, SOLVER)
        found = await accounts(two, [SOLVER])
    assert first.reason == "stop.steps = 2" and other.reason.startswith("the source is exhausted")
    assert (found[SOLVER].in_flight, found[SOLVER].imbalance) == (0, 0)


async def small_samples(bus: Bus) -> None:
    """SAMPLES holds a few executions, and none of the largest that would travel inline beside them."""
    stream = names.stream(bus.run, "samples")
    config = (await bus.api(f"STREAM.INFO.{stream}"))["config"]
    await bus.api(f"STREAM.UPDATE.{stream}", {**config, "max_bytes": 600 << 10})


async def test_a_rollback_of_one_policy_leaves_the_other_as_it_is(
    tmp_path: Path, two: Bus, publisher: Publisher
) -> None:
    """By the version's label; its trainer is held until it is let go by the policy's name."""
    trainer = f"trainer-{SOLVER}"
    slow = ["rollout.args.seconds=0.05", "policies.solver.trainer.checkpoint_every=1", f"run.name={two.run}"]
    async with line(tmp_path, two, publisher, *OPTIONS, *slow, roles=LINE) as run:
        visit = OpenRun(run.folder, resolve(run.folder.config), two, publisher, True)
        dying = ChainedTrainer(context(run.folder, two, await Publisher(two).start(), trainer))
        work = asyncio.create_task(dying.run())
        await steps(two, SOLVER, 3)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        durable = next(one for one in await durables(visit.of_policy(SOLVER)) if one.number == 1)
        done = await roll_back(visit, f"{SOLVER}@{durable.epoch}.1", "a test", hold=True)
        successor = ChainedTrainer(context(run.folder, two, await Publisher(two).start(), trainer))
        async with running(successor):
            await eventually(lambda: successor.state == "held")
            assert not await release(visit), "the run's own policy is not held"
            assert await release(visit.of_policy(SOLVER))
            await finished(two, publisher, DEADLINE_S)
            await finished(two, publisher, DEADLINE_S, SOLVER)
        first = await check(two, run.folder, own("policy"))
        found = (await accounts(two, [SOLVER]))[SOLVER]
    assert done.withdrawn_plans >= 1 and found.dropped_by_reason["withdrawn"] >= 1
    assert found.closes and first.closes and first.dropped_by_reason.keys() == {"absent"}


async def test_a_policy_that_never_has_a_turn_holds_nobody_up(tmp_path: Path, two: Bus, publisher: Publisher) -> None:
    """A third one, with the largest batches: what it drops makes room at once, and its model is the one that it began with."""
    third = ["policies.idle.trainer.groups_per_batch=5", "engines.idle.policy=idle"]
    async with line(tmp_path, two, publisher, *OPTIONS, *third, roles=(*BOTH, f"trainer-{IDLE}")) as run:
        await both_done(run)
        done = await finished(two, publisher, DEADLINE_S, IDLE)
        found = (await accounts(two, [SOLVER, IDLE]))[IDLE]
    assert (done.steps, found.trained, found.dropped_by_reason) == (0, 0, {"absent": TASKS})
    assert found.closes and found.in_flight == 0
    assert (run.folder.of_policy(IDLE).model / "weights").read_text() == ""
