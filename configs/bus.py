"""`bus:` the NATS JetStream server: embedded when `url` is null, else the one at `url`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from physarum.configs.types import BusUrl, Bytes, Count, Seconds, Section, VariableName

_MIB = 1 << 20
_GIB = 1 << 30


class BusConfig(Section):
    """How to reach the bus and how much it may hold. Secrets are read from the variables named by `*_env`."""

    url: BusUrl | None = None
    token_env: VariableName | None = None
    user_env: VariableName | None = None
    password_env: VariableName | None = None
    tls_ca: Path | None = None
    port: Annotated[int, Field(ge=-1, le=65535)] = -1
    """Port of the embedded server; -1 lets the system choose."""
    ack_wait_s: Seconds = 60.0
    """A message neither acknowledged nor reported in progress for this long is delivered again."""
    max_deliver: Count = 5
    """Deliveries before a message is moved to DEAD with its reason."""
    fetch_timeout_s: Seconds = 5.0
    inline_limit_bytes: Annotated[int, Field(ge=1, le=_MIB)] = 256 << 10
    """Payloads above this travel by reference; NATS refuses messages above 1 MiB by default."""
    replicas: Literal[1, 3, 5] = 1
    """Servers of a cluster that keep each stream; a message is stored when most of them have it. Needs `url`."""
    max_store_bytes: Bytes = 4 * _GIB
    """Disk that all streams together may take."""
    tasks_max_bytes: Bytes = 64 * _MIB
    """Bound of the TASKS stream: the source waits when it is reached."""
    start_timeout_s: Seconds = 20.0
    request_timeout_s: Seconds = 5.0
