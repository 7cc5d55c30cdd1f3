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
from physarum.agents.rewards.scoring import ROW_KEY
from physarum.bus.presence import Roster
from physarum.bus.records import Task
from physarum.configs.reward import RewardConfig
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import ClassifierReward, ServedReward, canonical

_log = logging.getLogger(__name__)


def engines_file(context: Context) -> Path:
    """Of this actor alone."""
    return context.folder.path / f"{context.identity.instance}.engines.json"


Groups = frozenset[str]
"""Of engines."""


class Needs:
    """Which engines of this run judge an execution, by the type of its row."""

    def __init__(self, reward: RewardConfig) -> None:
        self._type = reward.type
        self._own: dict[str, Groups] = {}
        self.default = self.of_group = Groups()
        for key, options in given_options(reward, ServedReward):
            engines = Groups([options.engine] if options.engine else [])
            if key[1] == "row_types":
                self._own[str(key[2])] = engines
            elif key[1] == "group":
                self.of_group = engines
            else:
                self.default = engines

    @property
    def all(self) -> Groups:
        return Groups().union(self.default, self.of_group, *self._own.values())

    def of(self, task: Task) -> Groups:
        """As agents/rewards/scoring.py chooses; a row of a type that is none asks nobody, and fails by name."""
        named = task.metadata.get(ROW_KEY)
        if named is None or (isinstance(named, str) and not named.strip()):
            return self.default
        known = canonical(named.strip()) if isinstance(named, str) else None
        return self.default if known == self._type else self._own.get(known or "", Groups())


class Judges:
    """The engines of this run that its rewards ask, by group, as presence tells of them."""

    def __init__(self, file: Path, groups: Groups) -> None:
        self._file = file
        self._written: dict[str, list[str]] | None = None
        self._there = {group: asyncio.Event() for group in sorted(groups)}
        self._losses = dict.fromkeys(self._there, 0)

    async def ready(self, groups: Groups) -> None:
        """Returns when each of these groups has a ready engine."""
        while missing := [self._there[group] for group in groups if not self._there[group].is_set()]:
            await missing[0].wait()

    def losses(self, groups: Groups) -> int:
        """How often one of these groups was left without a ready engine."""
        return sum(self._losses[group] for group in groups)

    def follow(self, roster: Roster) -> None:
        """What is ready now is written, if that is not what was."""
        ready = [beat for beat in roster.members if beat.state == READY and beat.facts.get("role") != "encoder"]
        found = {
            group: [str(beat.facts["url"]) for beat in ready if beat.facts.get("group") == group]
            for group in self._there
        }
        if found == self._written:
            return
        beside = self._file.with_suffix(".new")
        beside.write_bytes(orjson.dumps(found))
        os.replace(beside, self._file)
        self._written = found
        for group, urls in found.items():
            self._tell(group, bool(urls))

    def _tell(self, group: str, there: bool) -> None:
        event = self._there[group]
        if there:
            event.set()
        elif event.is_set():
            event.clear()
            self._losses[group] += 1
            _log.warning("no engine of %s is ready: what it would judge waits, and loses no try by that", group)


@asynccontextmanager
async def judges_followed(context: Context) -> AsyncIterator[Judges]:
    """Keeps `engines_file` while the block runs, where a reward names a group of engines; it begins once each has one ready,
    or at draining."""
    groups = Needs(context.config.reward).all
    judges = Judges(engines_file(context), groups)
    if not groups:
        yield judges
        return
    roster = Roster(context.bus, "engine", on_change=lambda: judges.follow(roster))
    async with roster.open():
        judges.follow(roster)
        await unless_draining(context, judges.ready(groups))
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
