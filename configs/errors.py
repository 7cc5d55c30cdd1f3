"""What can be wrong with a configuration, and the exceptions that say so.

Invariant: every message names where, what was found, what was expected and the remedy; no message ever shows a secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """`ERROR` refuses the run; `WARNING` is shown and the run starts."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration or with the host it would run on.

    `where` is `file:line: dotted.key`, `command line: dotted.key`, or just the key when its value is a default.
    `remedy` is an imperative sentence without the final period.
    """

    severity: Severity
    where: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; expected {self.expected}. Remedy: {self.remedy}."


def errors_in(problems: Iterable[Problem]) -> list[Problem]:
    """The problems that refuse a run."""
    return [problem for problem in problems if problem.severity is Severity.ERROR]


class PhysarumConfigError(Exception):
    """Base of every exception of `physarum.configs`."""


class ConfigError(PhysarumConfigError):
    """A configuration was refused; `problems` holds every reason, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class HookError(PhysarumConfigError):
    """A hook cannot be imported or cannot be called the way its role calls it."""

    def __init__(self, hook: str, found: str, expected: str, remedy: str) -> None:
        self.hook = hook
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"hook {hook}: found {found}; expected {expected}. Remedy: {remedy}.")


class SecretError(PhysarumConfigError):
    """The environment variable that should hold a secret is not set."""


class HubError(PhysarumConfigError):
    """A model could not be fetched from the hub."""


class HubOfflineError(HubError):
    """Offline mode, and the cache does not hold the whole snapshot."""


class HubUnreachableError(HubError):
    """The hub did not answer, and the cache does not hold the whole snapshot."""


class HubNotFoundError(HubError):
    """The hub answers, and has no such repository or revision (or hides it from this token)."""


class HubAccessError(HubError):
    """The hub refuses access: gated or private repository, missing or wrong token."""
