"""Which hook scores a run's executions: the user's own, or the one behind a ready-made reward or a function of slime's."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from physarum.actors.context import RunFolder
from physarum.actors.errors import UnrecoverableError
from physarum.agents.rewards.custom import HOOK as CUSTOM_HOOK
from physarum.agents.rewards.errors import SandboxError
from physarum.agents.rewards.sandbox import Sandbox
from physarum.agents.rewards.scoring import HOOK
from physarum.configs.reward import RewardConfig
from physarum.configs.reward_rules import given_options, read_options
from physarum.configs.reward_types import BackendReward, CodeReward
from physarum.configs.types import Arguments


class Scorer(NamedTuple):
    """A hook `(execution, **args)`, as its name."""

    hook: str
    args: Arguments


def scorer_of(reward: RewardConfig, folder: RunFolder) -> Scorer | None:
    """None where nothing scores: executions pass through."""
    if reward.hook is not None:
        return Scorer(reward.hook, reward.args)
    tokenizer = str(folder.start_model)
    if reward.custom_rm is not None:
        given: Arguments = {"function": reward.custom_rm, "args": reward.args, "batched": reward.batched}
        return Scorer(CUSTOM_HOOK, {**given, "folder": tokenizer})
    if reward.type is None:
        return None
    rows: Arguments = {name: _share(name, args, reward.processes) for name, args in reward.row_types.items()}
    args = _share(reward.type, reward.args, reward.processes)
    return Scorer(HOOK, {"name": reward.type, "args": args, "row_types": rows, "folder": tokenizer})


def _share(name: str, args: Arguments, processes: int) -> Arguments:
    """The options as each hook process gets them: its equal share of what the whole run may ask of a service."""
    options = read_options(name, orjson.dumps(args))
    if not isinstance(options, BackendReward):
        return args
    shared = dict(args)
    if options.rate_per_s is not None:
        shared["rate_per_s"] = options.rate_per_s / processes
    if options.concurrency is not None:
        shared["concurrency"] = options.concurrency // processes
    return shared


async def check_sandbox(reward: RewardConfig) -> None:
    """Runs a program in the sandbox that answers would run in. Raises UnrecoverableError where that is not possible here."""
    for _, options in given_options(reward, CodeReward):
        try:
            await Sandbox(options).probe()
        except SandboxError as error:
            raise UnrecoverableError(str(error)) from error
