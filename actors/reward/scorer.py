"""Which hook scores a run's executions: the user's own, or the one behind a ready-made reward."""

from __future__ import annotations

from typing import NamedTuple

from physarum.actors.context import RunFolder
from physarum.agents.rewards.scoring import HOOK
from physarum.configs.reward import RewardConfig
from physarum.configs.types import Arguments


class Scorer(NamedTuple):
    """A hook `(execution, **args)`, as its name."""

    hook: str
    args: Arguments


def scorer_of(reward: RewardConfig, folder: RunFolder) -> Scorer | None:
    """None where nothing scores: executions pass through."""
    if reward.hook is not None:
        return Scorer(reward.hook, reward.args)
    if reward.type is None:
        return None
    rows: Arguments = {name: dict(args) for name, args in reward.row_types.items()}
    return Scorer(
        HOOK, {"name": reward.type, "args": reward.args, "row_types": rows, "folder": str(folder.start_model)}
    )
