"""What can go wrong between a trainer's weights and an engine that serves them, one exception per meaning."""

from __future__ import annotations

from collections.abc import Sequence


class WeightSyncError(Exception):
    """Base of everything weight synchronisation raises on purpose."""


class ChunkAlteredError(WeightSyncError):
    """Bytes that do not have the digest they are named by."""


class ChunkMissingError(WeightSyncError):
    """No holder has this chunk."""


class ChunksAbsentError(WeightSyncError):
    """A manifest names chunks that are not in the store: `digests` are the absent ones."""

    def __init__(self, message: str, digests: Sequence[str]) -> None:
        super().__init__(message)
        self.digests = list(digests)


class NoRoomError(WeightSyncError):
    """The memory or the disk that a version needs is full."""


class ManifestError(WeightSyncError, ValueError):
    """A manifest that contradicts itself, or that does not fit the model it is meant for."""


class CarrierError(WeightSyncError):
    """A carrier (weightsync/carriers) cannot be had, register memory or read: chunks travel by HTTP then."""


class BucketError(WeightSyncError):
    """An object store cannot be reached, refused, or fell silent: another try may help."""


class BucketUnfitError(WeightSyncError):
    """An object store holds other things than it should, or cannot be opened from here: another try finds the same."""


class ObjectAbsentError(BucketUnfitError):
    """An object store has no such object."""


class TransportUnfitError(WeightSyncError):
    """The transport that is configured cannot be used here: what it lacks, and the remedy."""


class StaleVersionError(WeightSyncError):
    """A version at or below one that was already accepted: a trainer that lost its lease, or a late message."""


class VersionRefusedError(WeightSyncError):
    """A canary refused the version: no other engine takes it."""


class ServiceRefusedError(WeightSyncError):
    """The checkpoint service answered and refused: `status` and `body` are its own words."""

    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class ServiceUnreachableError(WeightSyncError):
    """No checkpoint service answered within the deadline."""


class UpdateRefusedError(WeightSyncError):
    """The update was not begun, and the engine serves what it served before."""


class EngineQuarantineError(WeightSyncError):
    """The engine's weights or state are not known: it must not serve until it was started anew."""


class DeviceError(WeightSyncError):
    """The process that holds weights on a device failed, died or did not answer in time; a new one is started next time."""


class QuantisationError(WeightSyncError, ValueError):
    """A quantization_config that is not understood, or a tensor that it cannot be applied to."""


class NonFiniteWeightError(QuantisationError):
    """A weight is inf or NaN: it has no quantised form."""
