"""SGLang's and its router's arguments of every group, compared with what is installed in its Python.

What engines were asked here before is remembered, and checked before every start. To ask imports SGLang (seconds), so that is
asked for: `actorctl check --arguments`. What neither finds, the engine's actor finds at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from physarum.actors.engine.arguments import SERVER, Rules, checked_arguments
from physarum.actors.engine.environment import detect_device, engine_environment, engine_python
from physarum.actors.engine.errors import EngineArgumentError, EngineInspectionError
from physarum.actors.engine.schema import ROUTER, SGLANG, Program, ServerSchema, inspect_program, remembered_at
from physarum.actors.router.process import RULES
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig


class _Place(NamedTuple):
    """Arguments of a group, and who takes them."""

    group: str
    key: KeyPath
    arguments: Mapping[str, Any]
    program: Program
    rules: Rules


async def check_arguments(config: RootConfig) -> list[Problem]:
    """One problem for each place whose arguments cannot stand, or that nobody can judge."""
    return [problem for place in _places(config) if (problem := await _asked(config, place)) is not None]


def remembered_arguments(config: RootConfig) -> Iterator[Problem]:
    """The same, where a server of this release was started from here before; nothing is started to find out."""
    for place in _places(config):
        schema = remembered_at(place.program, engine_python(config.engines[place.group]), _cache(config))
        if schema is not None and (problem := _judged(config, place, schema)) is not None:
            yield problem


def _places(config: RootConfig) -> Iterator[_Place]:
    for name, group in config.engines.items():
        if group.url is None:
            yield _Place(name, ("engines", name, "sglang"), group.sglang, SGLANG, SERVER)
        for index, part in enumerate(group.servers):
            if part.sglang:
                yield _Place(name, ("engines", name, "servers", index, "sglang"), part.sglang, SGLANG, SERVER)
        if group.start_router is not None:
            yield _Place(name, ("engines", name, "start_router"), group.start_router, ROUTER, RULES)


async def _asked(config: RootConfig, place: _Place) -> Problem | None:
    settings = config.engines[place.group]
    environment = engine_environment(detect_device(), settings.env)
    try:
        schema = await inspect_program(place.program, engine_python(settings), environment, _cache(config))
    except EngineInspectionError as error:
        where, expected = config.origins.where(place.key), f"{place.program.package} in the engine's Python"
        return Problem(Severity.ERROR, where, str(error), expected, "see the message")
    return _judged(config, place, schema)


def _judged(config: RootConfig, place: _Place, schema: ServerSchema) -> Problem | None:
    try:
        checked_arguments(place.arguments, schema, place.rules)
    except EngineArgumentError as error:
        where, expected = config.origins.where(place.key), f"arguments of {place.program.package}"
        return Problem(Severity.ERROR, where, str(error), expected, "correct them")
    return None


def _cache(config: RootConfig) -> Path:
    return Path(config.run.folder).parent / ".cache"


def run_check(config: RootConfig) -> list[Problem]:
    """The same, for a command."""
    return asyncio.run(check_arguments(config))
