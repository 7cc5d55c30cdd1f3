"""The place of a row within its source, as it stands in the names of groups and tasks: `epoch/index`, or `added/sequence`."""

from __future__ import annotations

from typing import Final

ADDED: Final = -1
"""The epoch of rows that were added at run time; their index is their sequence in ADDED."""
_WORD: Final = "added"


def written(epoch: int, index: int) -> str:
    return f"{_WORD if epoch == ADDED else epoch}/{index}"


def read(group: str) -> tuple[int, int]:
    """(epoch, index) of a group `source/epoch/index`."""
    epoch, index = group.rsplit("/", 2)[1:]
    return ADDED if epoch == _WORD else int(epoch), int(index)
