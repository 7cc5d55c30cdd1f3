"""Whether what an agent holds is what a manifest says: hashed where it lies, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.manifest import TensorEntry
from physarum.weightsync.parallel import in_thread


def verifiable(tensors: Sequence[TensorEntry]) -> bool:
    """Whether the manifest has digests that a device computes."""
    return all(tensor.device_digest for tensor in tensors)


async def altered(
    agent: DeviceAgent, tensors: Sequence[TensorEntry], offsets: Mapping[str, int], timeout_s: float
) -> list[str]:
    """Names of the tensors that are not as the manifest says; `offsets` are theirs in the agent's buffer.

    Raises DeviceError.
    """
    pieces = [(offsets[tensor.name], tensor.size_bytes) for tensor in tensors]
    answer = await in_thread(agent.call, "digests", timeout_s, pieces=pieces)
    return [
        tensor.name for tensor, digest in zip(tensors, answer["digests"], strict=True) if digest != tensor.device_digest
    ]
