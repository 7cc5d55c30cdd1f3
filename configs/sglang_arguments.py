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
_SECRET: Final = "secrets never stand on a command line, where every user of the host reads them"
RESERVED: Final[Mapping[str, str]] = {
    "model-path": "set model: (or engines.<group>.model) instead",
    "model": "set model: (or engines.<group>.model) instead",
    "host": "an engine that physarum starts listens on loopback; for one elsewhere set engines.<group>.url",
    "port": "a free port is reserved at start; for an engine elsewhere set engines.<group>.url",
    "weight-version": "it carries the version label, by which tokens are accounted",
    "served-model-name": "it is replaced at every weight update and means nothing here",
    "config": "write the arguments themselves under engines.<group>.sglang",
    "api-key": _SECRET,
    "admin-api-key": _SECRET,
    "ssl-keyfile-password": _SECRET,
    "grpc-mode": _NO_HTTP,
    "smg-grpc-mode": _NO_HTTP,
    "encoder-only": _NO_HTTP,
    "use-ray": "physarum starts and watches the server process itself",
}
"""By name: what to do instead."""


def canonical(written: str) -> str:
    """As SGLang's command line spells it, without the dashes before it."""
    return written.removeprefix("--").replace("_", "-")


def _normalise(value: Any) -> Any:
    """Null removes what a lower layer set."""
    if not isinstance(value, dict):
        raise refuse("a mapping of SGLang server arguments", "write `sglang: {mem-fraction-static: 0.3}`")
    spelled: dict[str, JsonValue] = {}
    for key, item in value.items():
        name = canonical(key)
        if name in spelled:
            raise refuse("each argument once", f"keep the spelling `{name}` only", found=f"`{name}` spelled twice")
        spelled[name] = item
    return {name: item for name, item in spelled.items() if item is not None}


SglangArguments = Annotated[dict[str, JsonValue], BeforeValidator(_normalise)]
