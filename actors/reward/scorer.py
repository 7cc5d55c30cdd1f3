"""Which hook scores a run's executions: the user's own, or the one behind a ready-made reward or a function of slime's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import orjson

from physarum.actors.context import RunFolder
from physarum.actors.errors import UnrecoverableError
from physarum.actors.reward.frames import Limits
from physarum.agents.rewards.custom import HOOK as CUSTOM_HOOK
from physarum.agents.rewards.errors import SandboxError
from physarum.agents.rewards.sandbox import Sandbox
from physarum.agents.rewards.scoring import HOOK
from physarum.agents.rewards.tournaments.judged import HOOK as TOURNAMENT_HOOK
from physarum.configs.reward import GroupRewardConfig, RewardConfig
from physarum.configs.reward_rules import given_options
from physarum.configs.reward_types import (
    GROUP_SECTIONS,
    BackendReward,
    ClassifierReward,
    CodeReward,
    ServedReward,
    section_of,
)
from physarum.configs.root import RootConfig
from physarum.configs.types import Arguments, Section

Models = Mapping[str, str]
"""Folders by group of engines."""
_NONE: Final[Models] = MappingProxyType({})


class Scorer(NamedTuple):
    """A hook `(execution, **args)`, as its name."""

    hook: str
    args: Arguments


def scorer_of(
    reward: RewardConfig, folder: RunFolder, engines: Path, models: Models = _NONE, token_env: str | None = None
) -> Scorer | None:
    """None where nothing scores: executions pass through. `engines`: where judges of this run are found (judges.py), with
    `token_env` by a key that is made of its value; `models`: models_of."""
    if reward.hook is not None:
        return Scorer(reward.hook, reward.args)
    tokenizer = str(folder.start_model)
    if reward.custom_rm is not None:
        given: Arguments = {"function": reward.custom_rm, "args": reward.args, "batched": reward.batched}
        return Scorer(CUSTOM_HOOK, {**given, "folder": tokenizer})
    if reward.type is None:
        return None
    rows: Arguments = {
        name: _shared(section_of(name), args, reward.processes, engines, models, token_env)
        for name, args in reward.row_types.items()
    }
    args = _shared(section_of(reward.type), reward.args, reward.processes, engines, models, token_env)
    return Scorer(HOOK, {"name": reward.type, "args": args, "row_types": rows, "folder": tokenizer})


def group_scorer_of(
    group: GroupRewardConfig, workers: int, folder: RunFolder, engines: Path, token_env: str | None = None
) -> Scorer:
    """The hook `(executions, **args)` of the one process that scores groups."""
    if group.hook is not None:
        return Scorer(group.hook, group.args)
    assert group.type is not None  # exactly one is set
    shared = _shared(GROUP_SECTIONS[group.type], group.args, workers, engines, {}, token_env)
    return Scorer(TOURNAMENT_HOOK, {"args": shared, "folder": str(folder.start_model)})


def limits_of(reward: RewardConfig, group: GroupRewardConfig | None = None) -> Limits:
    """Of a hook process, for executions or for groups."""
    return Limits(
        timeout_s=reward.timeout_s if group is None else group.timeout_s,
        concurrency=reward.concurrency,
        memory_bytes=None if reward.memory_mib is None else reward.memory_mib << 20,
        total_bytes=None if reward.total_mib is None else reward.total_mib << 20,
        children=reward.children,
        grouped=group is not None,
    )


def models_of(config: RootConfig) -> Models:
    """Of the groups that have a model of their own."""
    return {name: str(group.model) for name, group in config.engines.items() if group.model is not None}


def judges_token(config: RootConfig) -> str | None:
    """The variable of the token of which engines' keys are made, where they ask for one (actors/engine/opening.py)."""
    return config.checkpoint.token_env if config.machines else None


def _shared(
    section: type[Section], args: Arguments, processes: int, engines: Path, models: Models, token_env: str | None
) -> Arguments:
    """The options as each hook process gets them: its equal share of what the whole run may ask of a service, and where the
    engines of this run and their models are found."""
    options = section.model_validate_json(orjson.dumps(args))
    if not isinstance(options, BackendReward):
        return args
    shared = dict(args)
    if options.rate_per_s is not None:
        shared["rate_per_s"] = options.rate_per_s / processes
    if options.concurrency is not None:
        shared["concurrency"] = options.concurrency // processes
    if isinstance(options, ServedReward) and options.engine is not None:
        shared["engines_file"] = str(engines)
        if token_env is not None:
            shared["engines_token_env"] = token_env
    if isinstance(options, ClassifierReward):
        shared["model"] = options.model or models.get(options.engine or "")
    return shared


async def check_sandbox(reward: RewardConfig) -> None:
    """Runs a program in the sandbox that answers would run in. Raises UnrecoverableError where that is not possible here."""
    for _, options in given_options(reward, CodeReward):
        try:
            await Sandbox(options).probe()
        except SandboxError as error:
            raise UnrecoverableError(str(error)) from error
