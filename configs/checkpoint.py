"""`checkpoint:` the service that keeps versions and serves their chunks over HTTP."""

from __future__ import annotations

from typing import Literal

from physarum.configs.hook_call import HookCall
from physarum.configs.types import Bytes, Count, ObjectUrl, Port, Seconds, Section, VariableName


class VersionsConfig(Section):
    """`checkpoint.versions:` weight versions in an object store, for whoever reaches that and not the run's hosts."""

    mirror: ObjectUrl
    """Where they are copied to once they are published, for example s3://bucket/prefix; `run.name` is appended."""
    every: Count = 1
    """Copied: what is that many numbers after the one before, the first of each trainer, and the last of the run."""
    keep: Count = 2
    """Versions kept there."""
    timeout_s: Seconds = 60.0
    """Longest silence of the store, and of each of its answers to an engine."""
    key_env: VariableName | None = None
    """A secret that seals what is written there: whoever has it knows that nobody else wrote a version."""


class CheckpointConfig(Section):
    """`port` 0 lets the system choose; with `token_env` requests must carry the token that the variable holds."""

    count: Count = 1
    port: Port = 0
    chunk_bytes: Bytes = 4 << 20
    broadcast_timeout_s: Seconds = 30.0
    """A version that has not reached all engines of transport `nccl` by then is fetched by those who miss it."""
    differences: Literal["auto", "always", "never"] = "auto"
    """Whether engines' hosts take what changed of a chunk instead of the chunk; `auto`: as it is quicker on their network."""
    carrier: Literal["http", "auto", "mooncake", "nixl"] = "http"
    """How chunks travel between hosts: `mooncake` and `nixl` (extras of these names) read them out of the holder's memory, by
    RDMA where there is; `auto` the first of them that is installed, on hosts with RDMA devices. HTTP is what is left."""
    keep_last: Count = 3
    """Durable checkpoints kept."""
    mirror: ObjectUrl | None = None
    """Where each newest checkpoint is copied to beside training, for example s3://bucket/prefix; `run.name` is appended."""
    mirror_keep: Count | None = None
    """Checkpoints kept there; null: as many as `keep_last`."""
    mirror_timeout_s: Seconds = 300.0
    """Longest silence of the store, in which it takes or gives no further part of a file (s3fs: 50 MiB)."""
    versions: VersionsConfig | None = None
    """Null: versions are on the run's hosts alone."""
    keep_exports: Count | None = 3
    """Versions kept in `exports/` (`trainer.export_every`), the newest ones; null keeps all."""
    token_env: VariableName | None = None
    after_publish: HookCall | None = None
    """`async (manifest, **args)`, by the trainer, once engines may take a version; its failure is logged. Training goes on,
    the next publication waits."""
    before_pull: HookCall | None = None
    """`async (manifest, **args)`, by each engine's actor, before it looks for a version's bytes. Where it fails the engine
    keeps what it serves, and it is called again."""
