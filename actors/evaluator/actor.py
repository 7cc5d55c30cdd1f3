"""The evaluator actor: scores held-out problems at the start, at the end and, where asked for, every few versions.

    WEIGHTS head, engines that serve it --> tasks.eval --> rollout --> reward --> EVALS --> score --> RUN

Invariant: a score in the register is of one version, and those of start and end are written once. Evaluation uses the
run's own engines and workers but stands outside the account of executions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, ClassVar, Final

import msgspec

from physarum.actors import states
from physarum.actors.context import Context
from physarum.actors.errors import UnrecoverableError
from physarum.actors.evaluator.due import Due
from physarum.actors.evaluator.evaluation import Evaluation
from physarum.actors.evaluator.problems import load_problems
from physarum.actors.evaluator.scores import combined, described
from physarum.actors.evaluator.watching import Watch, within
from physarum.actors.runtime import Actor
from physarum.actors.states import EvalScore, SetScore
from physarum.actors.waiting import unless_draining
from physarum.bus.errors import WrongSequenceError
from physarum.bus.version import Version

_log = logging.getLogger(__name__)

_FOLLOW_S: Final = 30.0
"""How long an evaluation between start and end waits for the engines to take the head: training goes on meanwhile."""


class EvaluatorActor(Actor):
    """Role evaluator."""

    role: ClassVar[str] = "evaluator"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if self.config.evaluation is None:
            raise UnrecoverableError("no `evaluation` section is configured; add one, or do not start an evaluator")
        self._evaluation = self.config.evaluation
        self._scores = context.run_register(EvalScore)
        self._watch = Watch(context)
        self._rows: dict[str, list[dict[str, Any]]] = {}

    async def run(self) -> None:
        for name, part in self._evaluation.named().items():
            limit = self.bus.client.max_payload
            self._rows[name] = await asyncio.to_thread(load_problems, self.config, name, part, limit)
        await unless_draining(self.context, self._evaluate_all())
        if not self.context.draining.is_set():
            self.become("finished")
            await self.context.draining.wait()

    async def _evaluate_all(self) -> None:
        if self._evaluation.at_start and await self._missing(states.EVAL_START):
            self.become("waiting")
            head = await self._watch.first_head()
            # No deadline of its own: the engines' start is supervised, and draining ends this wait.
            await self._watch.hold(head.label)
            await self._watch.engines_at(head.label)
            await self._record(states.EVAL_START, await self._evaluate(head.label))
        await self._until_trained()
        if self._evaluation.at_end and await self._missing(states.EVAL_END):
            done = await self._watch.trainer_done()
            await self._engines_within(done.version, self._evaluation.timeout_s)
            await self._record(states.EVAL_END, await self._evaluate(done.version))

    async def _until_trained(self) -> None:
        """Evaluates every `every_versions` versions, or just waits."""
        self.become("ready")
        every = self._evaluation.every_versions
        waited: list[asyncio.Task[Any]] = [asyncio.create_task(self._watch.trainer_done(), name="end of training")]
        if every is not None:
            between = self._each_due(every) if self._evaluation.overflow == "wait" else self._between(every)
            waited.append(asyncio.create_task(between, name="evaluations between"))
        try:
            finished, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in waited:
                task.cancel()

    async def _last_number(self) -> int:
        """Of the newest version that has a score; of the head, where none has or its weights were withdrawn."""
        head = await self._watch.first_head()
        scored = [Version.parse(one.version).number for one in await self._scores.entries(states.EVAL_AT)]
        return min(head.number, max(scored, default=head.number))

    async def _between(self, every: int) -> None:
        last = await self._last_number()
        while True:
            head = await self._watch.head_from(last + every)
            last = head.number
            await self._engines_within(head.label, _FOLLOW_S)
            await self._emit("between", await self._evaluate(head.label))

    async def _each_due(self, every: int) -> None:
        due = Due(self.context, self._watch, every, await self._last_number())
        async with asyncio.TaskGroup() as group:
            group.create_task(due.follow(), name="versions that are due")
            while True:
                label = await due.next()
                await self._engines_within(label, _FOLLOW_S)
                await self._emit("between", await self._evaluate(label))
                await due.done(label)

    async def _engines_within(self, label: str, seconds: float) -> None:
        await self._watch.hold(label)
        if not await within(seconds, asyncio.ensure_future(self._watch.engines_at(label))):
            _log.warning(
                "not every engine serves %s after %g s; answers of others count as off_version", label, seconds
            )

    async def _evaluate(self, label: str) -> EvalScore:
        self.become("evaluating")
        started_at, sets = time.time(), dict[str, SetScore]()
        for name, rows in self._rows.items():
            sets[name] = found = await Evaluation(self.context, self._evaluation, name, rows, label).run()
            _log.info("evaluation of %s on %s: %s", label, name, described(found))
        score = combined(label, sets, started_at, time.time())
        self.numbers["score"] = score.score
        await self._scores.put(score, states.EVAL_AT, label)
        self.progressed()
        self.become("ready")
        return score

    async def _missing(self, key: str) -> bool:
        return (await self._scores.get(key)).value is None

    async def _record(self, key: str, score: EvalScore) -> None:
        """Writes the score where none is yet. A refusal means that an attempt with a lost receipt has written it."""
        entry = await self._scores.get(key)
        try:
            await self._scores.compare_and_set(score, entry.revision if entry.value is None else 0, key)
        except WrongSequenceError:
            _log.warning("%s was written before; that score stays", key)
        await self._emit(key.removeprefix("eval-"), score)

    async def _emit(self, when: str, score: EvalScore) -> None:
        await self.context.emit("eval", {"when": when, **msgspec.to_builtins(score, str_keys=True)})
