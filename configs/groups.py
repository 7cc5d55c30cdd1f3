"""`groups:` when a group of executions is closed although a member is missing, and how it goes on."""

from __future__ import annotations

from typing import Literal

from physarum.configs.types import Count, Natural, Seconds, Section


class GroupsConfig(Section):
    """A group is closed when all its members are there (or were given up), or at its deadline."""

    enough: Count | None = None
    """A group goes on with the first so many members (`source.group_size` is more then: over-provision); the others are cut off
    where they are, and dropped(late). Null: all of them. Long answers lose: see docs/rollout.md."""
    deadline_s: Seconds | None = None
    """From a group's first execution in the trainer (with `reward.group`: where it is gathered); null waits for every member.
    Later ones are dropped(late)."""
    refills: Natural = 1
    """Replacements (the same task, next attempt) asked for a member that was dead-lettered, before it is given up."""
    min_members: Count = 1
    """A group closed with fewer is handled by `incomplete`."""
    incomplete: Literal["train", "drop"] = "drop"
    """What happens to a group with fewer than `min_members`: trained all the same, or dropped(incomplete)."""
