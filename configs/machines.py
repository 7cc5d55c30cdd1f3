"""`machines:` several hosts that run one configuration: what each of them starts beside the head.

    machines:
      gpu: {count: 16, engines: {policy: 2}, rollout: 8, reward: 2}    # gpu-0 ... gpu-15, each with so many

`head` is always there and need not be written: it leads the run and starts whatever no other machine names. Empty: one machine.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field

from physarum.configs.types import Count, Name, Natural, Section

HEAD: Final = "head"


class MachineConfig(Section):
    """Equal machines, and how many actors of each group one of them has. A group that any machine names is shared out among
    those that name it; the others are the head's."""

    count: Count | None = None
    """NAME-0 ... NAME-(count - 1); null: one machine, called NAME."""
    engines: dict[Name, Natural] = Field(default_factory=dict)
    """By group. An engine over `nodes` counts once for each node: its nodes are on as many machines as it takes."""
    rollout: Natural | None = None
    reward: Natural | None = None


def names_of(name: str, machine: MachineConfig) -> list[str]:
    """The machines that one entry stands for."""
    return [name] if machine.count is None else [f"{name}-{rank}" for rank in range(machine.count)]
