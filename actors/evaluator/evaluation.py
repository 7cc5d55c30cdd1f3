"""One set's evaluation: its problems become tasks of class eval, its results are read from EVALS and DEAD.

Its tasks carry a source name made for it alone (`eval/<label>/<nonce>/<set>`). An evaluator that is killed in the middle
starts a new one; nothing of the old one is mistaken for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

from physarum.actors.context import Context
from physarum.actors.dead_letters import dead_task
from physarum.actors.eval_sets import source_name
from physarum.actors.evaluator.tally import Tally
from physarum.actors.own_samples import OwnSamples
from physarum.actors.source.tasks import group_tasks
from physarum.actors.states import SetScore
from physarum.actors.wire import publish_task, read_header
from physarum.bus import log
from physarum.bus.errors import CodecError
from physarum.bus.log import LogEntry, LogReader
from physarum.bus.names import StreamKey
from physarum.bus.records import Task
from physarum.configs.evaluation import EvaluationConfig
from physarum.configs.sampling import parameters

_log = logging.getLogger(__name__)

_WAIT_S: Final = 5.0


class Evaluation:
    """One set of problems at one version."""

    def __init__(
        self, context: Context, config: EvaluationConfig, name: str, rows: list[dict[str, Any]], label: str
    ) -> None:
        self._context, self._config, self._name, self._label = context, config, name, label
        self._part = config.named()[name]
        self.source = source_name(label, name)
        self._tasks = self._make_tasks(rows)
        self._tally = Tally(self._part, label, self._tasks)
        self._own = OwnSamples.of(context.config)
        self._complete = asyncio.Event()

    async def run(self) -> SetScore:
        """Ends when every answer is accounted for, or with what there is after evaluation.timeout_s."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._run()
        except TimeoutError:
            _log.warning(
                "evaluation of %s on %s: %d of %d answers have no result after evaluation.timeout_s = %g s; they count 0",
                self._label,
                self._name,
                self._tally.missing,
                len(self._tasks),
                self._config.timeout_s,
            )
        if self._tally.dead:
            _log.warning(
                "evaluation of %s on %s: %d answers are dead and count 0", self._label, self._name, self._tally.dead
            )
        return self._tally.score()

    async def _run(self) -> None:
        evals = await self._reader("evals", headers_only=True)
        dead = await self._reader("dead", headers_only=False)
        async with asyncio.TaskGroup() as group:
            readers = [
                group.create_task(self._follow(evals, self._on_result), name="eval results"),
                group.create_task(self._follow(dead, self._on_dead), name="eval dead letters"),
            ]
            for task in self._tasks:
                await publish_task(self._context, task)
            await self._complete.wait()
            for reader in readers:
                reader.cancel()

    async def _reader(self, key: StreamKey, *, headers_only: bool) -> LogReader:
        """From the log's end: what is there now was made for somebody else."""
        last = (await log.state(self._context.bus, key)).last
        return LogReader(self._context.bus, key, last + 1, headers_only=headers_only)

    async def _follow(self, reader: LogReader, handle: Callable[[LogEntry], None]) -> None:
        async with aclosing(reader.batches(_WAIT_S)) as batches:
            async for batch in batches:
                for entry in batch:
                    handle(entry)
                if not self._tally.missing:
                    self._complete.set()

    def _on_result(self, entry: LogEntry) -> None:
        try:
            self._tally.result(self._own.header(read_header(entry.headers)))
        except CodecError as error:
            _log.warning("EVALS #%d is not read: %s", entry.sequence, error)

    def _on_dead(self, entry: LogEntry) -> None:
        dead = dead_task(entry, self._context.bus.run)
        if dead is not None:
            self._tally.buried(dead.task)

    def _make_tasks(self, rows: list[dict[str, Any]]) -> list[Task]:
        sampling = parameters(self._config.sampling_of(self._part))
        samples = self._part.samples
        return [
            task
            for index, row in enumerate(rows)
            for task in group_tasks(
                row,
                run=self._context.bus.run,
                source=self.source,
                place=str(index),
                first_ordinal=index * samples,
                group_size=samples,
                sampling=sampling,
                task_class="eval",
            )
        ]
