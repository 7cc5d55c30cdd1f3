"""`blobs:` bytes above `bus.inline_limit_bytes`: where they are kept, in how many copies, and for how long."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from physarum.configs.types import Bytes, Count, Seconds, Section


class BlobsConfig(Section):
    """A blob is kept while a message in a stream or in the archive refers to it."""

    access: Literal["auto", "folder", "http"] = "auto"
    """`folder`: this machine's actors read and write `blobs/` of the run's folder; `http`: they go through the checkpoint
    actors; `auto`: the folder where it is one that a checkpoint actor announces, HTTP elsewhere."""
    replicas: Count = 1
    """Stores that have a blob on disk before it counts as written. Each checkpoint actor has one (`checkpoint.count`)."""
    timeout_s: Seconds = 30.0
    """Longest silence of a store, and longest wait for enough of them; large blobs have more, by their size."""
    cache_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Disk for blobs that were fetched over HTTP, for each actor; the ones unused for longest go first."""
    largest_bytes: Bytes = 16 << 30
    """A store refuses larger ones."""
    grace_s: Annotated[float, Field(ge=0)] = 3600.0
    """What nothing refers to stays this long: its message may be about to be published."""
    sweep_every_s: Annotated[float, Field(ge=0)] = 600.0
    """Shortest time between two sweeps; one follows a durable checkpoint."""
