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
from physarum.configs.root import RootConfig
from physarum.configs.semantic import semantic_problems

__all__ = ["check"]

_CHECKS: tuple[Callable[[RootConfig], Iterator[Problem]], ...] = (
    check_hooks,
    check_model,
    check_engines,
    check_groups,
    check_data,
    check_secrets,
    check_ports,
    check_devices,
    check_disk,
)


def check(config: RootConfig) -> list[Problem]:
    """Every problem of a run about to start on this host, errors first; `errors.errors_in` tells whether to refuse."""
    problems = [*semantic_problems(config), *(problem for one in _CHECKS for problem in one(config))]
    return sorted(problems, key=lambda problem: problem.severity)
