"""Who takes part in the next broadcast, as all see it: one register entry, written by the trainer that holds the lease.

    sender: members (presence) --> Round that gathers --> agents are started, on all sides at once
            Round of a version --> agents meet in the sender's store --> the version
    engine: sees a Round that names it --> its agent receives --> `arrived` compares digests with the manifest

A broadcast is a short cut and never the only way: the version is on the trainer's host as always, and whoever does not have
it by the round's end fetches it there.
"""

from __future__ import annotations

from typing import Final

import msgspec

ROUND: Final = "round"
MEMBER_FACT: Final = "broadcast"
"""In an engine's presence: it has an agent that takes part."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One version for `members` (rank r + 1 is member r). `name` is the group's; `until` (Unix seconds): then it is over."""

    name: str
    epoch: int
    label: str
    host: str
    port: int
    members: tuple[str, ...]
    until: float
    gathers: bool = False
    """Nothing is sent yet, and there is no port: who was in another group gets a new agent ready."""
