"""The whole line source -> rollout -> reward -> trainer over a real server, with a trainer that needs no torch.

Actors run inside the test (`line`) or as processes that can be killed (`Crew`). Plans, ledger, bodies, cursor, checkpoints
and trimming are the product's own; only the weights are replaced: they are a digest chained over the batches trained, so
"the weights are those of these batches in this order" is one comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ClassVar, Final, cast
from unittest import mock

import xxhash
from actor_fixture import running
from bus_fixture import DEADLINE_S
from fault_hooks import tokens_of

from physarum.actors import main, policies, states
from physarum.actors.account import Account, account, accounts, settled
from physarum.actors.context import Context, Identity, RunFolder
from physarum.actors.janitor.actor import JanitorActor
from physarum.actors.policies import policy_of
from physarum.actors.reward.actor import RewardActor
from physarum.actors.rollout.actor import RolloutActor
from physarum.actors.runtime import Actor
from physarum.actors.source.actor import SourceActor
from physarum.actors.trainer.actor import TrainerActor
from physarum.actors.trainer.batch import StepResult, TrainSequence
from physarum.actors.trainer.world import World
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.bus import lease, ledger, names, presence
from physarum.bus.connection import Bus
from physarum.bus.ledger import PlanRecord
from physarum.bus.publisher import Publisher
from physarum.bus.register import Register
from physarum.configs.loader import dump, resolve
from physarum.configs.overrides import parse_command_line

HOOKS: Final = Path(__file__).with_name("fault_hooks.py")
RECIPE: Final = f"""\
run: {{name: test}}
bus: {{ack_wait_s: 2.0, max_deliver: 3, fetch_timeout_s: 0.5}}
model: {{path: .}}
source: {{hook: "{HOOKS}:Rows", args: {{size: 20}}, group_size: 2, shuffle: false, epochs: 1}}
rollout: {{slots: 8, generate: "{HOOKS}:generate"}}
trainer: {{objective: sft, lr: 1e-4, groups_per_batch: 2, checkpoint_every: 3}}
age: {{bound: 1}}
stop: {{steps: 1000000}}
supervisor: {{heartbeat_s: 0.25}}
"""

LINE: Final = ("source", "rollout", "reward", "trainer")

Ordinal = tuple[int, int]
"""A task by its ordinal and attempt."""


class ChainedWorld:
    """Stands where the Megatron world does: its weights are a digest over every batch in order.

    A step waits for `gate` (in the torch thread), so that a test can make the trainer as slow as it likes.
    """

    gate: ClassVar[threading.Event] = threading.Event()
    gate.set()

    def __init__(self) -> None:
        self.weights = ""

    def step(
        self, sequences: Sequence[TrainSequence], lr: float | None = None, number: int | None = None
    ) -> StepResult:
        self.gate.wait(DEADLINE_S)
        self.weights = chained(
            self.weights, [sequence.token_ids[: len(tokens_of(0))].tolist() for sequence in sequences]
        )
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        return StepResult(
            loss=0.0, grad_norm=0.0, tokens_trained=tokens, sequences=len(sequences), metrics={}, seconds=0.0
        )

    def export(self) -> Iterator[Any]:
        return iter(())

    def begin_save(self, folder: Path) -> Callable[[float], None]:
        weights = self.weights
        return lambda timeout_s: self._write(folder, weights)

    def _write(self, folder: Path, weights: str) -> None:
        (folder / "weights").write_text(weights)

    def load(self, folder: Path) -> None:
        self.weights = (folder / "weights").read_text()

    def save_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._write(folder, self.weights)


def chained(weights: str, batch: list[list[int]]) -> str:
    """The weights after `batch` was trained on `weights`."""
    return xxhash.xxh3_128_hexdigest(f"{weights}{batch}".encode())


class ChainedTrainer(TrainerActor):
    """Role trainer over a ChainedWorld."""

    async def _world(self, model: Path) -> World:
        return cast(World, ChainedWorld())


KINDS: Final[dict[str, type[Actor]]] = {
    "source": SourceActor,
    "rollout": RolloutActor,
    "reward": RewardActor,
    "trainer": ChainedTrainer,
    "janitor": JanitorActor,
}


def prepare(folder: Path, run: str, *overrides: str) -> RunFolder:
    """A run folder as the supervisor leaves it for its actors, but for the endpoint."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    made = RunFolder(folder / run)
    made.bus.mkdir(parents=True, exist_ok=True)
    config = resolve(recipe, parse_command_line(list(overrides)))
    made.config.write_text(dump(config))
    for view in config.views():
        start = made.of_policy(view.policy).start_model
        save_tokenizer(start)
        (start / "config.json").write_text("{}")
    return made


def context(folder: RunFolder, bus: Bus, publisher: Publisher, role: str) -> Context:
    """A context over `folder`; a new one for each actor (it carries the wish that the actor drain). `trainer-NAME` is the
    trainer of a further policy."""
    identity, whole = Identity(bus.run, role.partition("-")[0], f"{role}-0"), resolve(folder.config)
    policy = policy_of(whole, identity.role, identity.instance)
    view, own = whole.of_policy(policy), folder.of_policy(policy)
    return Context(identity, view, own, bus.endpoint, bus, publisher)


class Line:
    """Actors at work inside the test."""

    def __init__(self, folder: RunFolder, bus: Bus, publisher: Publisher, actors: dict[str, Actor]) -> None:
        self.folder, self.bus, self.publisher, self.actors = folder, bus, publisher, actors

    async def done(self, deadline_s: float = 2 * DEADLINE_S) -> states.TrainerDone:
        return await finished(self.bus, self.publisher, deadline_s)

    async def account(self) -> Account:
        return await account(self.bus)

    async def check(self, expected: Counter[Ordinal]) -> Account:
        return await check(self.bus, self.folder, expected)


@contextlib.asynccontextmanager
async def line(
    place: Path, bus: Bus, publisher: Publisher, *overrides: str, roles: Sequence[str] = LINE
) -> AsyncIterator[Line]:
    """The actors of `roles` in this process, each over a window of its own; drained at the end of the block."""
    folder = prepare(place, bus.run, *overrides)
    actors: dict[str, Actor] = {}
    async with contextlib.AsyncExitStack() as stack:
        for role in roles:
            own = await Publisher(bus).start()
            actors[role] = KINDS[role.partition("-")[0]](context(folder, bus, own, role))
            await stack.enter_async_context(running(actors[role]))
        yield Line(folder, bus, publisher, actors)


async def finished(bus: Bus, publisher: Publisher, deadline_s: float, policy: str = "") -> states.TrainerDone:
    """What the trainer of a policy says when it is done."""
    register: Register[states.TrainerDone] = Register(bus, publisher, "run", states.TrainerDone)
    key = policies.key(states.TRAINER_DONE, policy)
    async with asyncio.timeout(deadline_s), register.watch(*key) as changed:
        while (value := (await register.get(*key)).value) is None:
            await changed.wait()
            changed.clear()
    return value


async def check(bus: Bus, folder: RunFolder, expected: Counter[Ordinal], policy: str = "", marked: int = 0) -> Account:
    """Asserts that exactly `expected` was trained, each once, and that the weights are made of just these batches.

    `expected` counts (ordinal, attempt); `marked`: what the policy's tokens have in the place of the attempt, more than that.
    Returns the account, which closes.
    """
    done = settled(await ledger.read(bus, key=names.ledger_of(policy)))
    trained = Counter((one.ordinal, one.attempt) for step, plan in done for one in plan.executions if step.changed)
    assert trained == expected
    weights = ""
    for _, plan in done:
        weights = chained(weights, _tokens(plan, marked)) if plan.executions else weights
    assert (folder.of_policy(policy).model / "weights").read_text() == weights
    made = (await accounts(bus, [policy] if policy else []))[policy]
    assert made.closes, made
    assert made.trained == expected.total()
    return made


def _tokens(plan: PlanRecord, marked: int) -> list[list[int]]:
    return [tokens_of(one.ordinal, one.attempt + marked) for one in plan.executions]


class Crew:
    """Actor processes of one run folder: started, killed and started again by name. Forked from a process that has
    imported everything, since a trainer takes seconds to import and is to be killed often."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["fault_line"])
        # The server imports what it is told to from its own path, and says nothing when it cannot.
        here = Path(__file__).parent
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parent)])):
            forkserver.ensure_running()
        self._processes: dict[str, ForkServerProcess] = {}
        self.kills: Counter[str] = Counter()

    def start(self, role: str) -> None:
        process = self._fork.Process(target=act, args=(str(self.folder.path), role), name=role, daemon=True)
        process.start()
        self._processes[role] = process

    def kill(self, role: str) -> None:
        """SIGKILL, and a successor at once."""
        self._end(role)
        self.kills[role] += 1
        self.start(role)

    def restart_ended(self) -> list[str]:
        """Starts what ended by itself, as a supervisor does; their roles (a lease that was lost ends its owner)."""
        ended = [role for role, process in self._processes.items() if not process.is_alive()]
        for role in ended:
            self.start(role)
        return ended

    def end(self) -> None:
        for role in self._processes:
            self._end(role)

    def _end(self, role: str) -> None:
        self._processes[role].kill()
        self._processes[role].join(DEADLINE_S)

    def log(self, role: str) -> str:
        return (self.folder.path / f"{role}.log").read_text(errors="replace")


def act(folder: str, role: str) -> None:
    """The life of one actor process, with leases and presence that end sooner, so that successors need not wait long."""
    lease.TTL_S, lease.RENEW_S, lease._EXPIRY_LOOK_S = 2, 0.4, 0.05  # type: ignore[misc]
    presence.EXPIRY_S = 2  # type: ignore[misc]
    os.setsid()
    log = os.open(Path(folder) / f"{role}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    plain = role.partition("-")[0]
    kind = KINDS[plain]
    main.actor_class = lambda role: kind
    os._exit(main.main([folder, plain, f"{role}-0"]))
