"""Where each value of a configuration was written.

Invariant: an origin never changes what a configuration says; all `Origins` compare equal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KeyPath = tuple[str | int, ...]
"""The way to a value: `("engines", "policy", "count")`."""


def dotted(key: KeyPath) -> str:
    """The text form of a key path."""
    return ".".join(str(part) for part in key)


@dataclass(frozen=True, slots=True)
class Origin:
    """A line of a file, or the command line when `file` is None."""

    file: Path | None
    line: int = 0

    @property
    def folder(self) -> Path:
        """The folder that relative paths written here start from."""
        return Path.cwd() if self.file is None else self.file.parent

    def __str__(self) -> str:
        return "command line" if self.file is None else f"{display_path(self.file)}:{self.line}"


@dataclass(frozen=True)
class Origins:
    """The origin of each section and leaf that was written; defaults have none."""

    places: Mapping[KeyPath, Origin] = field(default_factory=dict, compare=False)

    def find(self, key: KeyPath) -> Origin | None:
        """The origin of `key` itself, or None when it was not written."""
        return self.places.get(key)

    def nearest(self, key: KeyPath) -> Origin | None:
        """The origin of `key` or of the closest section around it."""
        for length in range(len(key), -1, -1):
            if (origin := self.places.get(key[:length])) is not None:
                return origin
        return None

    def where(self, key: KeyPath) -> str:
        """`file:line: dotted.key` for a message; a value that nobody wrote is called a default."""
        if (origin := self.find(key)) is not None:
            return f"{origin}: {dotted(key)}" if key else str(origin)
        return f"{dotted(key)} (default)"


def display_path(path: Path) -> str:
    """The shorter of the absolute path and the path relative to the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
