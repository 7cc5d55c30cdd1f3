"""SGLang's and its router's arguments of every group, compared with what is installed in its Python.

It imports SGLang where no run has asked before (seconds), so it is asked for: `actorctl check --arguments`. What it does not
find, the engine's actor finds at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from physarum.actors.engine.arguments import SERVER, Rules, checked_arguments
from physarum.actors.engine.environment import detect_device, engine_environment, engine_python
from physarum.actors.engine.errors import EngineArgumentError, EngineInspectionError
from physarum.actors.engine.schema import ROUTER, SGLANG, Program, inspect_program
from physarum.actors.router.process import RULES
from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig


async def check_arguments(config: RootConfig) -> list[Problem]:
    """One problem for each place whose arguments cannot stand, or that nobody can judge."""
    return [problem for place in _places(config) if (problem := await _checked(config, *place)) is not None]


def _places(config: RootConfig) -> Iterator[tuple[str, KeyPath, Mapping[str, Any], Program, Rules]]:
    for name, group in config.engines.items():
        if group.url is None:
            yield name, ("engines", name, "sglang"), group.sglang, SGLANG, SERVER
        for index, part in enumerate(group.servers):
            if part.sglang:
                yield name, ("engines", name, "servers", index, "sglang"), part.sglang, SGLANG, SERVER
        if group.start_router is not None:
            yield name, ("engines", name, "start_router"), group.start_router, ROUTER, RULES


async def _checked(
    config: RootConfig, group: str, key: KeyPath, arguments: Mapping[str, Any], program: Program, rules: Rules
) -> Problem | None:
    settings, where = config.engines[group], config.origins.where(key)
    environment = engine_environment(detect_device(), settings.env)
    cache = Path(config.run.folder).parent / ".cache"
    try:
        schema = await inspect_program(program, engine_python(settings), environment, cache)
        checked_arguments(arguments, schema, rules)
    except EngineArgumentError as error:
        return Problem(Severity.ERROR, where, str(error), f"arguments of {program.package}", "correct them")
    except EngineInspectionError as error:
        return Problem(
            Severity.ERROR, where, str(error), f"{program.package} in the engine's Python", "see the message"
        )
    return None


def run_check(config: RootConfig) -> list[Problem]:
    """The same, for a command."""
    return asyncio.run(check_arguments(config))
