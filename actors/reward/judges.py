"""Where hook processes find the engines of this run that judge: a file that this actor keeps as presence tells.

Invariant: the file is whole at every moment, and holds the ready engines of every group that a reward names; a hook process
reads it before each request, so an engine that was started anew at another port is found there. While a group has none, no
execution loses a try for that: what would be judged is held (RewardActor.judged).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from physarum.actors.context import Context
from physarum.actors.engine.frozen import check_reader
from physarum.actors.policy_engines import READY
from physarum.actors.waiting import unless_draining
from physarum.bus.presence import Roster
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import ClassifierReward, ServedReward

_log = logging.getLogger(__name__)


def engines_file(context: Context) -> Path:
    """Of this actor alone."""
    return context.folder.path / f"{context.identity.instance}.engines.json"


class Judges:
    """The engines of this run that its rewards ask, by group. `ready` is set while each group has one, or none is asked."""

    def __init__(self, file: Path, groups: set[str]) -> None:
        self._file, self._groups = file, groups
        self._written: dict[str, list[str]] | None = None
        self.ready = asyncio.Event()
        self.losses = 0
        """How often `ready` ended."""
        if not groups:
            self.ready.set()

    def follow(self, roster: Roster) -> None:
        """What is ready now is written, if that is not what was."""
        ready = [beat for beat in roster.members if beat.state == READY and beat.facts.get("role") != "encoder"]
        found = {
            group: [str(beat.facts["url"]) for beat in ready if beat.facts.get("group") == group]
            for group in sorted(self._groups)
        }
        if found == self._written:
            return
        beside = self._file.with_suffix(".new")
        beside.write_bytes(orjson.dumps(found))
        os.replace(beside, self._file)
        self._written = found
        self._tell([group for group, urls in found.items() if not urls])

    def _tell(self, away: list[str]) -> None:
        if not away:
            self.ready.set()
        elif self.ready.is_set():
            self.ready.clear()
            self.losses += 1
            named = " and ".join(away)
            _log.warning("no engine of %s is ready: what it would judge waits, and loses no try by that", named)


@asynccontextmanager
async def judges_followed(context: Context) -> AsyncIterator[Judges]:
    """Keeps `engines_file` while the block runs, where a reward names a group of engines; it begins once each has one ready,
    or at draining."""
    groups = {options.engine for _, options in given_options(context.config.reward, ServedReward) if options.engine}
    judges = Judges(engines_file(context), groups)
    if not groups:
        yield judges
        return
    roster = Roster(context.bus, "engine", on_change=lambda: judges.follow(roster))
    async with roster.open():
        judges.follow(roster)
        await unless_draining(context, judges.ready.wait())
        await _check_readers(context)
        yield judges


async def _check_readers(context: Context) -> None:
    """A classifier's texts are rendered here: by its own tokenizer, as its engines have it. Raises UnrecoverableError."""
    for _, options in given_options(context.config.reward, ClassifierReward):
        if options.engine is None or options.render != "chat":
            continue
        folder = options.model or context.config.engines[options.engine].model
        assert folder is not None  # a rule of the configuration
        await check_reader(context, options.engine, Path(folder))
