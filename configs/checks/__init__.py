"""Everything that can be known to be wrong before a process starts.

Invariant: `check` starts no process of the run, opens no connection and leaves nothing behind; it reports every
problem. Hooks are imported, so their modules' own side effects do happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from physarum.configs.checks.data import check_data
from physarum.configs.checks.engines import check_groups
from physarum.configs.checks.host import check_devices, check_disk, check_ports, check_secrets
from physarum.configs.checks.imports import check_hooks
from physarum.configs.checks.model import check_engines, check_model
from physarum.configs.errors import Problem
from physarum.configs.machines import HEAD
from physarum.configs.placement import reduced
from physarum.configs.root import RootConfig
from physarum.configs.semantic import semantic_problems

__all__ = ["check"]

_OF_THE_HEAD: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (check_model, check_data, check_ports)
"""The other machines get the start model from it."""
_EVERYWHERE: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (check_hooks, check_groups, check_secrets)


def check(config: RootConfig, machine: str = HEAD) -> list[Problem]:
    """Every problem of a run (of several machines: of one machine's part) about to start on this host, errors first;
    `errors.errors_in` tells whether to refuse."""
    here = machine if config.machines else None
    known = (*_EVERYWHERE, *(_OF_THE_HEAD if machine == HEAD else ()))
    problems = [*semantic_problems(config), *(problem for one in known for problem in one(config))]
    problems += [*check_engines(reduced(config, machine)), *check_devices(config, here), *check_disk(config, here)]
    return sorted(problems, key=lambda problem: problem.severity)
