"""What a rule finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from physarum.configs.origin import KeyPath
from physarum.configs.root import RootConfig

Finding: TypeAlias = tuple[KeyPath, str, str, str]
"""Key path to point at, found, expected, remedy."""
Rule: TypeAlias = Callable[[RootConfig], Iterator[Finding]]
