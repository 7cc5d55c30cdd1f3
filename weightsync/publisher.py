"""From a snapshot to a version in the checkpoint service.

On the service's own host the file that was filled becomes the version as it is; elsewhere its chunks are sent, those that
the service lacks. The version exists when `upload` returns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Final

import aiohttp

from physarum.bus.version import Version
from physarum.weightsync.digest import Algorithm
from physarum.weightsync.errors import ChunksAbsentError, ServiceRefusedError, ServiceUnreachableError
from physarum.weightsync.manifest import Manifest
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.snapshot import Snapshot

DEFAULT_CONCURRENCY: Final = 4

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 5.0


async def upload(
    snapshot: Snapshot,
    version: Version,
    url: str,
    token: str | None,
    deadline_s: float,
    *,
    session: aiohttp.ClientSession,
    model_digest: str,
    step: int,
    parent: str | None = None,
    metrics: Mapping[str, float] | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
    algorithm: Algorithm = "xxh3",
) -> Manifest:
    """Publishes `snapshot` as `version` and returns its manifest, which the service then holds durably.

    A service that does not answer, or answers 5xx, is asked again until `deadline_s` (seconds from now).
    Raises ServiceUnreachableError at the deadline, ServiceRefusedError when it refuses (an older version: this trainer
    lost its lease).
    """
    entries, chunks = await asyncio.to_thread(snapshot.entries, algorithm)
    manifest = Manifest(
        version=version,
        parent=parent,
        model_digest=model_digest,
        tensors=entries,
        total_bytes=snapshot.total_bytes,
        step=step,
        created=time.time(),
        metrics=dict(metrics or {}),
    )
    client = CheckpointClient(url, token, session)
    last: list[ServiceUnreachableError | ServiceRefusedError | ChunksAbsentError] = []
    try:
        async with asyncio.timeout(deadline_s):
            await _persist(client, manifest, snapshot, chunks, concurrency, last)
    except TimeoutError as error:
        reason = f"; the last answer: {last[-1]}" if last else ""
        raise ServiceUnreachableError(
            f"{version} could not be published to {url} within {deadline_s:g} s{reason}"
        ) from error
    return manifest


async def _persist(
    client: CheckpointClient,
    manifest: Manifest,
    snapshot: Snapshot,
    chunks: Mapping[str, memoryview],
    concurrency: int,
    last: list[ServiceUnreachableError | ServiceRefusedError | ChunksAbsentError],
) -> None:
    """Tries until it succeeds or is refused; the caller's deadline ends it. Chunks may vanish meanwhile: sent again."""
    delay_s = _FIRST_RETRY_S
    while True:
        try:
            if snapshot.filling.path is None or not await client.hold(manifest, snapshot.filling.path.name):
                await _send_missing(client, chunks, concurrency)
                await client.put_manifest(manifest)
        except (ServiceUnreachableError, ChunksAbsentError) as error:
            last.append(error)
        except ServiceRefusedError as error:
            if error.status < 500:
                raise
            last.append(error)
        else:
            return
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.5))
        delay_s = min(2 * delay_s, _LONGEST_RETRY_S)


async def _send_missing(client: CheckpointClient, chunks: Mapping[str, memoryview], concurrency: int) -> None:
    """Workers share one iterator, so at most `concurrency` chunks are under way. The first failure ends all."""
    queue = iter(await client.missing(list(chunks)))

    async def work() -> None:
        for digest in queue:
            await client.put_chunk(digest, chunks[digest])

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
