"""The engines that serve a policy, the one whose view of the run is given, as presence tells of them."""

from __future__ import annotations

from typing import Any, Final

from physarum.actors import states
from physarum.bus.presence import Roster
from physarum.bus.version import Version
from physarum.configs.root import RootConfig

READY: Final = "ready"
HANDING_OVER: Final = "handing over"
"""A half of a pair, while it takes a version: it takes no requests."""
ON_TRIAL: Final = "canary"
"""It tries a version before the others take it: it takes no requests meanwhile."""
_DEFAULT_GROUP: Final = "policy"


def policy_group(config: RootConfig) -> str:
    """The first group that follows the policy's versions and is not kept for evaluations."""
    kept = None if config.evaluation is None else config.evaluation.engines
    following = [name for name in config.following if name != kept]
    return following[0] if following else _DEFAULT_GROUP


def evaluation_group(config: RootConfig) -> str:
    """The group that answers evaluations."""
    own = None if config.evaluation is None else config.evaluation.engines
    return policy_group(config) if own is None else own


def recording(config: RootConfig, group: str) -> dict[str, Any]:
    """SGLang's arguments for what the trainer replays: every process of an engine of `group` has them, on each node."""
    replays = config.trainer.algorithm.replay.routing == "R3" and group == policy_group(config)
    return {"enable-return-routed-experts": True} if replays else {}


def head_key(config: RootConfig, group: str) -> tuple[str, str]:
    """Where, in WEIGHTS, the version stands that the engines of `group` take."""
    own = None if config.evaluation is None else config.evaluation.engines
    if config.engines[group].weights_from == "mirror":
        return (states.MIRRORED, config.model.name)
    return (states.EVAL_HEAD if group == own else states.HEAD, config.model.name)


def served_versions(roster: Roster, group: str) -> list[Version]:
    """What the ready engines of `group` announced last, each version once; it is announced after it is served."""
    ready = [beat for beat in roster.members if beat.state == READY and beat.facts.get("group") == group]
    return [Version.parse(text) for text in sorted({beat.facts["version"] for beat in ready})]
