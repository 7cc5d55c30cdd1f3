"""Where hook processes find the engines of this run that judge: a file that this actor keeps as presence tells.

Invariant: the file is whole at every moment, and holds the ready engines of every group that a reward names; a hook process
reads it before each request, so an engine that was started anew at another port is found there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from physarum.actors.context import Context
from physarum.actors.engine.frozen import check_reader
from physarum.actors.policy_engines import READY
from physarum.bus.presence import Roster
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import ClassifierReward, ServedReward


def engines_file(context: Context) -> Path:
    """Of this actor alone."""
    return context.folder.path / f"{context.identity.instance}.engines.json"


@asynccontextmanager
async def judges_followed(context: Context) -> AsyncIterator[None]:
    """Keeps `engines_file` while the block runs, where a reward names a group of engines; it begins once each has one ready,
    or at draining: a judge that is still being started must cost no execution a try."""
    groups = {options.engine for _, options in given_options(context.config.reward, ServedReward) if options.engine}
    if not groups:
        yield
        return
    book = _Book(engines_file(context), groups)
    roster = Roster(context.bus, "engine", on_change=lambda: book.write(roster))
    async with roster.open():
        book.write(roster)
        waiting = [asyncio.ensure_future(one) for one in (book.complete.wait(), context.draining.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        await _check_readers(context)
        yield


async def _check_readers(context: Context) -> None:
    """A classifier's texts are rendered here: by its own tokenizer, as its engines have it. Raises UnrecoverableError."""
    for _, options in given_options(context.config.reward, ClassifierReward):
        if options.engine is None or options.render != "chat":
            continue
        folder = options.model or context.config.engines[options.engine].model
        assert folder is not None  # a rule of the configuration
        await check_reader(context, options.engine, Path(folder))


class _Book:
    def __init__(self, file: Path, groups: set[str]) -> None:
        self._file, self._groups = file, groups
        self._written: dict[str, list[str]] | None = None
        self.complete = asyncio.Event()

    def write(self, roster: Roster) -> None:
        """What is ready now, if that is not what was written."""
        ready = [beat for beat in roster.members if beat.state == READY and beat.facts.get("role") != "encoder"]
        found = {
            group: [str(beat.facts["url"]) for beat in ready if beat.facts.get("group") == group]
            for group in sorted(self._groups)
        }
        if found != self._written:
            beside = self._file.with_suffix(".new")
            beside.write_bytes(orjson.dumps(found))
            os.replace(beside, self._file)
            self._written = found
        if all(found.values()):
            self.complete.set()
