"""`engines.<group>.servers:` one group of different servers, which serve the same weights.

    servers: [{role: prefill, count: 2, gpus: 4, sglang: {tp-size: 2}}, {role: decode, count: 3, gpus: 12}]

The servers of a group are numbered through, part by part: here `policy-0` and `policy-1` prefill. Invariant: each number has
one part; numbers beyond the last (`actorctl scale`) are of the last part that has servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from pydantic import Field, model_validator

from physarum.configs.sglang_arguments import OwnArguments
from physarum.configs.types import Count, Devices, Environment, Natural, Section, refuse

ServerRole = Literal["regular", "prefill", "decode", "encoder", "placeholder"]
PAIRED: Final = ("prefill", "decode")
"""Roles that serve a request together."""


class ServersConfig(Section):
    """Equal servers of a group. Their `sglang` and `env` lie over the group's."""

    role: ServerRole = "regular"
    """`prefill` and `decode` answer a request as a pair; `encoder` encodes images for the others; `placeholder` starts nothing
    and keeps its devices from everybody."""
    count: Natural = 1
    nodes: Count = 1
    """Hosts over which each server spans."""
    gpus: Devices = 0
    sglang: OwnArguments = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)

    @model_validator(mode="after")
    def _placeholder(self) -> ServersConfig:
        if self.role == "placeholder" and (not self.gpus or self.sglang or self.env):
            raise refuse("`gpus` and nothing else with `role: placeholder`", "name the devices that it keeps")
        if self.role != "placeholder" and not self.count:
            raise refuse("at least one server", "raise `count`, or remove the part")
        return self

    @property
    def started(self) -> int:
        """How many servers it has."""
        return 0 if self.role == "placeholder" else self.count


class Place(NamedTuple):
    """Of a server: which part it is of, and its number there."""

    part: int
    number: int


def place_of(parts: Sequence[ServersConfig], number: int) -> Place:
    """Of server `number` of the group. Raises LookupError where no part has servers."""
    first, last = 0, None
    for index, part in enumerate(parts):
        if not part.started:
            continue
        if number < first + part.started:
            return Place(index, number - first)
        last, first = (index, first), first + part.started
    if last is None:
        raise LookupError(f"server {number}: no part of the group has servers")
    return Place(last[0], number - last[1])


def check_roles(parts: Sequence[ServersConfig]) -> None:
    """Raises a refusal of roles that do not serve a request together."""
    roles = {part.role for part in parts if part.started}
    if not roles:
        raise refuse("at least one part with servers", "add `{role: regular, count: 1}`, or remove the group")
    found = ", ".join(sorted(roles))
    if roles & set(PAIRED) and not roles >= set(PAIRED):
        missing = next(role for role in PAIRED if role not in roles)
        raise refuse("both `prefill` and `decode`", f"add a part with `role: {missing}`", found=f"the roles {found}")
    if "regular" in roles and roles & set(PAIRED):
        raise refuse(
            "`regular` servers, or pairs of `prefill` and `decode`",
            "make two groups of them",
            found=f"the roles {found}",
        )
    if roles == {"encoder"}:
        raise refuse("servers that the encoders encode for", "add a part that generates", found="encoders alone")
