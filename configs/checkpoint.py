"""`checkpoint:` the service that keeps versions and serves their chunks over HTTP."""

from __future__ import annotations

from typing import Literal

from physarum.configs.hook_call import HookCall
from physarum.configs.types import Bytes, Count, Port, Seconds, Section, VariableName


class CheckpointConfig(Section):
    """`port` 0 lets the system choose; with `token_env` requests must carry the token that the variable holds."""

    count: Count = 1
    port: Port = 0
    chunk_bytes: Bytes = 4 << 20
    broadcast_timeout_s: Seconds = 30.0
    """A version that has not reached all engines of transport `nccl` by then is fetched by those who miss it."""
    differences: Literal["auto", "always", "never"] = "auto"
    """Whether engines' hosts take what changed of a chunk instead of the chunk; `auto`: as it is quicker on their network."""
    keep_last: Count = 3
    """Durable checkpoints kept."""
    keep_exports: Count | None = 3
    """Versions kept in `exports/` (`trainer.export_every`), the newest ones; null keeps all."""
    token_env: VariableName | None = None
    after_publish: HookCall | None = None
    """`async (manifest, **args)`, by the trainer, once engines may take a version; its failure is logged. Training goes on,
    the next publication waits."""
    before_pull: HookCall | None = None
    """`async (manifest, **args)`, by each engine's actor, before it looks for a version's bytes. Where it fails the engine
    keeps what it serves, and it is called again."""
