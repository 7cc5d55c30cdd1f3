"""A version's changed tensors in the memory of an engine's agent, verified where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from physarum.weightsync.device.checks import altered, verifiable
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.dtypes import by_name
from physarum.weightsync.errors import ChunkAlteredError
from physarum.weightsync.held_file import HeldFile
from physarum.weightsync.manifest import Manifest, TensorEntry
from physarum.weightsync.parallel import in_thread

ALIGNED: Final = 4096
"""Bytes: digests are of whole rows, SGLang views a piece of the buffer as the tensor's dtype, kernels read whole vectors."""


async def stage(
    agent: DeviceAgent, file: HeldFile, manifest: Manifest, changed: Sequence[TensorEntry], timeout_s: float
) -> list[Any]:
    """Each tensor's name, dtype, shape, offset in the file, offset in the agent's buffer, bytes. Where the manifest has digests
    that a device computes they are verified there. Raises DeviceError, ChunkAlteredError."""
    places, size = _places(file, changed)
    await in_thread(agent.call, "stage", timeout_s, (file.descriptor,), tensors=places, size=size)
    if verifiable(manifest.tensors):
        offsets = {str(place[0]): int(place[4]) for place in places}
        wrong = await altered(agent, changed, offsets, timeout_s)
        if wrong:
            raise ChunkAlteredError(f"{manifest.label}: {', '.join(wrong[:3])} are altered on the device")
    return places


def _places(file: HeldFile, tensors: Sequence[TensorEntry]) -> tuple[list[Any], int]:
    places: list[Any] = []
    end = 0
    for one in tensors:
        places.append([one.name, by_name(one.dtype).name, list(one.shape), file.offset(one.name), end, one.size_bytes])
        end += -(-one.size_bytes // ALIGNED) * ALIGNED
    return places, end
