"""Digests of a file's chunks, each computed as soon as its bytes stand there, beside whoever goes on writing.

Invariant: a chunk is read only below the place that `reached` named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from physarum.weightsync.digest import Algorithm, digest_of
from physarum.weightsync.layout import Form, Layout
from physarum.weightsync.manifest import Chunk
from physarum.weightsync.mappings import memory_of
from physarum.weightsync.parallel import THREADS

Chunks = dict[str, tuple[Chunk, ...]]
"""Of each tensor, in order."""

ALGORITHM: Final[Algorithm] = "xxh3"


def by_tensor(names: Iterable[str], chunks: Iterable[tuple[str, Chunk]]) -> Chunks:
    """Each tensor's chunks in the order given; a tensor without bytes has none."""
    listed: dict[str, list[Chunk]] = {name: [] for name in names}
    for name, chunk in chunks:
        listed[name].append(chunk)
    return {name: tuple(found) for name, found in listed.items()}


class ChunkHashing:
    """Of the tensors of `layout`, which are written in its order into the file `descriptor`; it gets its whole size here."""

    def __init__(self, descriptor: int, forms: Mapping[str, Form], layout: Layout, chunk_bytes: int) -> None:
        if os.fstat(descriptor).st_size < layout.size_bytes:
            os.ftruncate(descriptor, layout.size_bytes)
        self._memory = memoryview(memory_of(descriptor))
        self._places = [
            (name, start, min(chunk_bytes, layout.offsets[name] + form.size_bytes - start))
            for name, form in forms.items()
            for start in range(layout.offsets[name], layout.offsets[name] + form.size_bytes, chunk_bytes)
        ]
        self._names = tuple(forms)
        self._begun: list[Future[str]] = []
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="hashing")

    def __enter__(self) -> ChunkHashing:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def reached(self, end: int) -> None:
        """Everything before byte `end` of the file is as it stays."""
        for _, start, size in self._places[len(self._begun) :]:
            if start + size > end:
                return
            self._begun.append(self._pool.submit(digest_of, self._memory[start : start + size], ALGORITHM))

    def chunks(self) -> Chunks:
        """Once the end was reached; waits for the last digests."""
        digests = (digest.result() for digest in self._begun)
        found = ((name, Chunk(digest, size)) for (name, _, size), digest in zip(self._places, digests, strict=True))
        return by_tensor(self._names, found)
