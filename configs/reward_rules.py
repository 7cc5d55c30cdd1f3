"""The options of ready-made rewards, read with the section of their type.

Invariant: what `reward_problems` lets pass, the reward's process can read again with `read_options`.
"""

from __future__ import annotations

import orjson
from pydantic import ValidationError

from physarum.configs.errors import Problem
from physarum.configs.origin import KeyPath, Origins
from physarum.configs.problems import schema_problems
from physarum.configs.reward import RewardConfig
from physarum.configs.reward_types import section_of
from physarum.configs.types import Arguments, Section


def read_options(name: str, args_json: bytes) -> Section:
    """Options of the type `name` (as `canonical` returned it). Raises pydantic's ValidationError."""
    return section_of(name).model_validate_json(args_json)


def reward_problems(reward: RewardConfig, origins: Origins) -> list[Problem]:
    """Every option that its type refuses, with the line it was written in."""
    given: list[tuple[KeyPath, str, Arguments]] = []
    if reward.type is not None:
        given.append((("reward", "args"), reward.type, reward.args))
    given += [(("reward", "row_types", name), name, args) for name, args in reward.row_types.items()]
    return [problem for key, name, args in given for problem in _refused(key, name, args, origins)]


def _refused(key: KeyPath, name: str, args: Arguments, origins: Origins) -> list[Problem]:
    try:
        read_options(name, orjson.dumps(args))
    except ValidationError as error:
        return schema_problems(error, section_of(name), origins, key)
    return []
