"""Which transports there are, what each needs, and which one an engine gets: what is configured, or by `auto` the first that
is for such an engine and lacks nothing. To add one: a line in KINDS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.errors import TransportUnfitError
from physarum.weightsync.staging import Staging
from physarum.weightsync.target import WeightTarget
from physarum.weightsync.transports.checkpoint_engine import CheckpointEngineTransport
from physarum.weightsync.transports.disk import DiskTransport
from physarum.weightsync.transports.ipc import IpcTransport
from physarum.weightsync.transports.nccl import NcclTransport
from physarum.weightsync.transports.transport import Transport

CHECKPOINT_ENGINE: Final = "checkpoint-engine"
_OLDEST_CHECKPOINT_ENGINE: Final = (0, 4)
_REMEDY: Final = (
    "install it in the engine's environment (pip install --group engine-checkpoint, or 'checkpoint-engine>=0.4,<0.5'),"
    " or set another engines.GROUP.transport"
)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Of one engine. `packages`: versions in its Python, "" for what is not installed; None: not known yet."""

    device: Literal["cpu", "cuda"]
    started_here: bool
    waits_for_weights: bool
    """It serves nothing before it got weights by /update_weights_from_ipc."""
    own_draft: bool = False
    """It drafts with another model than its own: versions must not be loaded into that."""
    chooses_models: bool = True
    """An update can be for its target alone."""
    on_this_host: bool = True
    """All of its ranks are where the agent is."""
    replicated: bool = False
    """It has data-parallel replicas or pipeline stages."""
    packages: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What transports are made of. `agent` is a process beside the engine, for those that need one; `me`: the engine's name."""

    target: WeightTarget
    staging: Staging
    agent: DeviceAgent
    ranks: int
    timeout_s: float
    me: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One transport. `lacks`: why it cannot be taken, with the remedy; "" when it can. `suits`: `auto` may take it."""

    name: str
    by_agent: bool
    make: Callable[[Parts], Transport]
    lacks: Callable[[Surroundings], str] = lambda found: ""
    suits: Callable[[Surroundings], bool]


def _no_receiver(found: Surroundings) -> str:
    if found.device != "cuda":
        return "checkpoint-engine's receiver in the engine knows CUDA only; set another engines.GROUP.transport"
    if not found.on_this_host:  # its receiver would wait at an address that is not there, for ever
        return (
            "the engine is on another host, and takes memory of its own alone; set engines.GROUP.transport to disk, or name it"
            " localhost in engines.GROUP.url if it is on this one"
        )
    if found.replicated:
        return (
            "SGLang takes no weights from checkpoint-engine with dp-size or pp-size above 1; set another"
            " engines.GROUP.transport"
        )
    if found.own_draft or found.packages is None:
        return _shares(found)
    installed = found.packages.get(CHECKPOINT_ENGINE, "")
    if not installed:
        return f"the package checkpoint-engine is not installed; {_REMEDY}"
    if _release(installed) < _OLDEST_CHECKPOINT_ENGINE:
        return f"checkpoint-engine {installed} speaks an older protocol, expected 0.4 or newer; {_REMEDY}"
    return ""


def _shares(found: Surroundings) -> str:
    """Of a transport whose call in the engine is for all of its models."""
    if not found.own_draft:
        return ""
    return (
        "the engine drafts with a model of its own (speculative-draft-model-path), and SGLang would load versions into that"
        " too; set engines.GROUP.transport to ipc, nccl or auto"
    )


def _no_choice(found: Surroundings) -> str:
    if not found.own_draft or found.chooses_models:
        return _waits(found)
    return (
        "this sglang loads versions into the draft model too (speculative-draft-model-path); use sglang >= 0.5.23, or"
        " draft with the model's own layers"
    )


def _waits(found: Surroundings) -> str:
    if not found.waits_for_weights:
        return ""
    return (
        "the engine is started with checkpoint-engine-wait-weights-before-ready and takes its first weights by"
        " checkpoint_engine alone; set engines.GROUP.transport to that or to auto, or remove the argument"
    )


KINDS: Final = (
    Kind(
        name="checkpoint_engine",
        by_agent=True,
        make=lambda parts: CheckpointEngineTransport(parts.target, parts.agent, parts.ranks, parts.timeout_s),
        lacks=_no_receiver,
        suits=lambda found: found.waits_for_weights,
    ),
    Kind(
        name="ipc",
        by_agent=True,
        make=lambda parts: IpcTransport(parts.target, parts.agent, parts.ranks, parts.timeout_s),
        lacks=_no_choice,
        suits=lambda found: (found.device == "cuda" and found.started_here and found.on_this_host) or found.own_draft,
    ),
    Kind(
        name="nccl",
        by_agent=True,
        make=lambda parts: NcclTransport(parts.target, parts.agent, parts.ranks, parts.timeout_s, parts.me),
        lacks=_no_choice,
        suits=lambda found: False,  # it takes memory from the trainer's device: only where it is asked for
    ),
    Kind(
        name="disk",
        by_agent=False,
        make=lambda parts: DiskTransport(parts.target, parts.staging),
        lacks=lambda found: _waits(found) or _shares(found),
        suits=lambda found: True,
    ),
)


def fitting(configured: str, found: Surroundings) -> Kind:
    """The transport that an engine gets. Raises TransportUnfitError: what it lacks, and the remedy."""
    if configured != "auto":
        kind = next(one for one in KINDS if one.name == configured)
        if lack := kind.lacks(found):
            raise TransportUnfitError(f"transport {configured}: {lack}")
        return kind
    suited = [one for one in KINDS if one.suits(found)]
    lacks = {one.name: one.lacks(found) for one in suited}
    for one in suited:
        if not lacks[one.name]:
            return one
    raise TransportUnfitError("; ".join(f"transport {name}: {lack}" for name, lack in lacks.items()))


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
