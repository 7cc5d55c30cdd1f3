"""`engines.<group>.sglang:` arguments of SGLang's command line, in one spelling, and those that physarum sets itself.

Which others there are only the installed server knows (actors/engine/schema.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, JsonValue

from physarum.configs.types import refuse

WAITS_FOR_WEIGHTS: Final = "checkpoint-engine-wait-weights-before-ready"
DRAFT_MODEL: Final = "speculative-draft-model-path"
_NO_HTTP: Final = "physarum addresses the engine over SGLang's HTTP interface"
_ROLE: Final = "write engines.<group>.servers with the role of each part"
_NODES: Final = "set engines.<group>.nodes: each node is an actor, and they are told where to meet"
_ENCODERS: Final = "encoders are registered as they become ready"
_SECRET: Final = "secrets never stand on a command line, where every user of the host reads them"
RESERVED: Final[Mapping[str, str]] = {
    "model-path": "set model: (or engines.<group>.model) instead",
    "model": "set model: (or engines.<group>.model) instead",
    "host": "one that physarum starts listens on loopback, of several machines on all; for another set engines.<group>.url",
    "port": "a free port is reserved at start; for an engine elsewhere set engines.<group>.url",
    "weight-version": "it carries the version label, by which tokens are accounted",
    "served-model-name": "it is replaced at every weight update and means nothing here",
    "config": "write the arguments themselves under engines.<group>.sglang",
    "api-key": _SECRET,
    "admin-api-key": _SECRET,
    "ssl-keyfile-password": _SECRET,
    "grpc-mode": _NO_HTTP,
    "smg-grpc-mode": _NO_HTTP,
    "disaggregation-mode": _ROLE,
    "disaggregation-bootstrap-port": "a free port is reserved at start, and decode servers are told of it",
    "encoder-only": _ROLE,
    "language-only": _ROLE,
    "encoder-urls": _ENCODERS,
    "encoder-register-urls": _ENCODERS,
    "encoder-bootstrap-port": "a free port is reserved at start",
    "nnodes": _NODES,
    "node-rank": _NODES,
    "dist-init-addr": _NODES,
    "use-ray": "physarum starts and watches the server process itself",
}
"""By name: what to do instead."""


def canonical(written: str) -> str:
    """As SGLang's command line spells it, without the dashes before it."""
    return written.removeprefix("--").replace("_", "-")


def _spelled(value: Any) -> Any:
    if not isinstance(value, dict):
        raise refuse("a mapping of SGLang server arguments", "write `sglang: {mem-fraction-static: 0.3}`")
    spelled: dict[str, JsonValue] = {}
    for key, item in value.items():
        name = canonical(key)
        if name in spelled:
            raise refuse("each argument once", f"keep the spelling `{name}` only", found=f"`{name}` spelled twice")
        spelled[name] = item
    return spelled


def _without_nulls(value: Any) -> Any:
    return {name: item for name, item in _spelled(value).items() if item is not None}


SglangArguments = Annotated[dict[str, JsonValue], BeforeValidator(_without_nulls)]
"""Of a group; null removes what a lower layer set."""
OwnArguments = Annotated[dict[str, JsonValue], BeforeValidator(_spelled)]
"""Over those of the group; null removes one of them."""
