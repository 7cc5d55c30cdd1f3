"""Whether what an agent holds is what a manifest says: hashed where it lies, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.digest import algorithm_of, multilinear_name
from physarum.weightsync.manifest import TensorEntry
from physarum.weightsync.parallel import in_thread


def verifiable(tensors: Sequence[TensorEntry]) -> bool:
    """Whether a device can compute all their digests."""
    return all(algorithm_of(chunk.digest) == "multilinear" for tensor in tensors for chunk in tensor.chunks)


async def altered(
    agent: DeviceAgent, tensors: Sequence[TensorEntry], offsets: Mapping[str, int], timeout_s: float
) -> list[str]:
    """Names of the tensors with a chunk that is another than the manifest's; `offsets` are theirs in the agent's buffer.

    Raises DeviceError.
    """
    chunks: list[tuple[int, int]] = []
    expected: list[tuple[str, str]] = []
    for tensor in tensors:
        at = offsets[tensor.name]
        for chunk in tensor.chunks:
            chunks.append((at, chunk.size))
            expected.append((tensor.name, chunk.digest))
            at += chunk.size
    answer = await in_thread(agent.call, "digests", timeout_s, chunks=chunks)
    found = map(multilinear_name, answer["digests"])
    return sorted({name for one, (name, digest) in zip(found, expected, strict=True) if one != digest})
