"""The options of ready-made rewards, read with the section of their type.

Invariant: what `reward_problems` lets pass, the reward's process can read again with `read_options`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import orjson
from pydantic import ValidationError

from physarum.configs.errors import Problem, Severity
from physarum.configs.origin import KeyPath, Origins, dotted
from physarum.configs.problems import schema_problems
from physarum.configs.reward import RewardConfig
from physarum.configs.reward_types import GROUP_SECTIONS, BackendReward, CodeReward, section_of
from physarum.configs.types import Arguments, Section

SectionT = TypeVar("SectionT", bound=Section)


def read_options(name: str, args_json: bytes) -> Section:
    """Options of the type `name` (as `canonical` returned it). Raises pydantic's ValidationError."""
    return section_of(name).model_validate_json(args_json)


def reward_problems(reward: RewardConfig, origins: Origins) -> list[Problem]:
    """Every option that its type refuses, with the line it was written in."""
    found: list[Problem] = []
    for key, section, args in _given(reward):
        try:
            options = section.model_validate_json(orjson.dumps(args))
        except ValidationError as error:
            found += schema_problems(error, section, origins, key)
            continue
        if isinstance(options, (BackendReward, CodeReward)):
            found += _late(reward, options.deadline_s, key, origins)
        if isinstance(options, BackendReward):
            found += _crowded(reward, options, key, origins)
    return found


def given_options(reward: RewardConfig, kind: type[SectionT]) -> Iterator[tuple[KeyPath, SectionT]]:
    """The options of this kind, and where each was written; without those that `reward_problems` names."""
    for key, section, args in _given(reward):
        with contextlib.suppress(ValidationError):
            options = section.model_validate_json(orjson.dumps(args))
            if isinstance(options, kind):
                yield key, options


def _given(reward: RewardConfig) -> Iterator[tuple[KeyPath, type[Section], Arguments]]:
    if reward.type is not None:
        yield ("reward", "args"), section_of(reward.type), reward.args
    for name, args in reward.row_types.items():
        yield ("reward", "row_types", name), section_of(name), args
    if reward.group is not None and reward.group.type is not None:
        yield ("reward", "group", "args"), GROUP_SECTIONS[reward.group.type], reward.group.args


def _late(reward: RewardConfig, deadline_s: float, key: KeyPath, origins: Origins) -> Iterator[Problem]:
    place, limit, timeout_s = f"{dotted(key)}.deadline_s", "reward.timeout_s", reward.timeout_s
    if reward.group is not None and key[1] == "group":
        limit, timeout_s = "reward.group.timeout_s", reward.group.timeout_s
    if deadline_s >= timeout_s:
        found = f"`{place}: {deadline_s:g}` with `{limit}: {timeout_s:g}`"
        where, remedy = origins.where((*key, "deadline_s")), f"raise `{limit}`, or lower `{place}`"
        yield Problem(Severity.ERROR, where, found, "a deadline that ends before the call is killed", remedy)


def _crowded(reward: RewardConfig, backend: BackendReward, key: KeyPath, origins: Origins) -> Iterator[Problem]:
    if backend.concurrency is not None and backend.concurrency < reward.processes:
        found = f"`{dotted(key)}.concurrency: {backend.concurrency}` with {reward.processes} hook processes"
        remedy = "lower `reward.workers` or `reward.count`, and raise `reward.concurrency` instead"
        where = origins.where((*key, "concurrency"))
        yield Problem(Severity.ERROR, where, found, "at least one request for each hook process", remedy)
