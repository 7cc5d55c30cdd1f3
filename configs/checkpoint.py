"""`checkpoint:` the service that keeps versions and serves their chunks over HTTP."""

from __future__ import annotations

from physarum.configs.types import Bytes, Count, Port, Section, VariableName


class CheckpointConfig(Section):
    """`port` 0 lets the system choose; with `token_env` requests must carry the token that the variable holds."""

    count: Count = 1
    port: Port = 0
    chunk_bytes: Bytes = 4 << 20
    keep_last: Count = 3
    """Durable checkpoints kept."""
    keep_exports: Count | None = 3
    """Versions kept in `exports/` (`trainer.export_every`), the newest ones; null keeps all."""
    token_env: VariableName | None = None
