"""The engines that serve the policy, as presence tells of them."""

from __future__ import annotations

from typing import Final

from physarum.bus.presence import Roster
from physarum.bus.version import Version
from physarum.configs.root import RootConfig

READY: Final = "ready"
_DEFAULT_GROUP: Final = "policy"


def policy_group(config: RootConfig) -> str:
    """The first group without a model of its own."""
    following = [name for name, engine in config.engines.items() if engine.model is None]
    return following[0] if following else _DEFAULT_GROUP


def served_versions(roster: Roster, group: str) -> list[Version]:
    """What the ready engines of `group` announced last, each version once; it is announced after it is served."""
    ready = [beat for beat in roster.members if beat.state == READY and beat.facts.get("group") == group]
    return [Version.parse(text) for text in sorted({beat.facts["version"] for beat in ready})]
