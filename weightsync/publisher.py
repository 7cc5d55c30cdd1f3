"""From a trainer's tensors to a version in the checkpoint service.

Invariant: `Snapshot.take` is the only part during which the trainer must hold still; what it returns shares no memory
with the model. `upload` sends only the chunks that the service lacks; the version exists when it returns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from physarum.bus.version import Version
from physarum.weightsync.digest import Algorithm, digest_of
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ChunksAbsentError, ManifestError, ServiceRefusedError, ServiceUnreachableError
from physarum.weightsync.manifest import Chunk, Manifest, TensorEntry
from physarum.weightsync.service_client import CheckpointClient

if TYPE_CHECKING:
    import torch

DEFAULT_CHUNK_BYTES: Final = 4 * 1024 * 1024
DEFAULT_CONCURRENCY: Final = 4

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 5.0


class HostTensor(msgspec.Struct, frozen=True):
    """One tensor's bytes in host memory, little-endian and row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Snapshot:
    """All tensors of one version in host memory, under their Hugging Face names."""

    def __init__(self, tensors: Iterable[HostTensor], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self.tensors = tuple(tensors)
        self.chunk_bytes = chunk_bytes
        self.total_bytes = sum(tensor.data.nbytes for tensor in self.tensors)

    @classmethod
    def take(cls, named: Iterable[tuple[str, torch.Tensor]], chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> Snapshot:
        """Copies every tensor to host memory; blocks until that is done. Raises ManifestError for a strange dtype."""
        return cls((_host_copy(name, tensor) for name, tensor in named), chunk_bytes)

    def entries(self, algorithm: Algorithm = "xxh3") -> tuple[tuple[TensorEntry, ...], dict[str, memoryview]]:
        """The manifest's tensors, and the bytes of every distinct chunk. Hashes everything: call it from a thread."""
        chunks: dict[str, memoryview] = {}
        entries: list[TensorEntry] = []
        for tensor in self.tensors:
            named = [(digest_of(piece, algorithm), piece) for piece in self._pieces(tensor.data)]
            chunks.update(named)
            listed = tuple(Chunk(digest, piece.nbytes) for digest, piece in named)
            entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, listed))
        return tuple(entries), chunks

    def _pieces(self, data: memoryview) -> Iterator[memoryview]:
        for start in range(0, data.nbytes, self.chunk_bytes):
            yield data[start : start + self.chunk_bytes]


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
            await _persist(client, manifest, chunks, concurrency, last)
    except TimeoutError as error:
        reason = f"; the last answer: {last[-1]}" if last else ""
        raise ServiceUnreachableError(
            f"{version} could not be published to {url} within {deadline_s:g} s{reason}"
        ) from error
    return manifest


async def _persist(
    client: CheckpointClient,
    manifest: Manifest,
    chunks: Mapping[str, memoryview],
    concurrency: int,
    last: list[ServiceUnreachableError | ServiceRefusedError | ChunksAbsentError],
) -> None:
    """Tries until it succeeds or is refused; the caller's deadline ends it. Chunks may vanish meanwhile: sent again."""
    delay_s = _FIRST_RETRY_S
    while True:
        try:
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


def _host_copy(name: str, tensor: torch.Tensor) -> HostTensor:
    import torch

    dtype = by_name(str(tensor.dtype).removeprefix("torch."))
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
    data = copy.reshape(-1).view(torch.uint8).numpy().data if copy.numel() else memoryview(b"")
    expected = tensor.numel() * dtype.size_bytes
    if data.nbytes != expected:
        raise ManifestError(f"tensor {name} is {data.nbytes} bytes on the host, expected {expected}")
    return HostTensor(name, dtype.name, tuple(tensor.shape), data)
