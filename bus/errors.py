"""One exception per meaning; every message says what was found, what was expected and the remedy."""


class BusError(Exception):
    """Base of everything the bus raises on purpose."""


class CodecError(BusError):
    """Bytes that are not what their type says: altered, truncated, or of another schema."""


class HeaderTooLargeError(CodecError):
    """What a planner must know of an execution does not fit into the headers of a message."""


class RecordError(BusError, ValueError):
    """A record that must not exist: unequal lengths, a trainable token without log-probability."""


class ForeignRunError(BusError):
    """A message of another run arrived here; it is refused and counted."""


class BusUnreachableError(BusError):
    """No NATS server answered at the URL within the deadline."""


class BusRefusedError(BusError):
    """The server answered and refused: permissions, limits, or a name that does not exist."""


class NotStoredError(BusRefusedError):
    """The stream holds no such message."""


class StreamFullError(BusError):
    """The stream is at its limit and discards new messages; the publisher must wait."""


class PublishTimeoutError(BusError):
    """No acknowledgement within the caller's deadline; the message may or may not be stored."""


class WrongSequenceError(BusError):
    """Compare-and-set lost: somebody else wrote this subject or stream first."""


class LeaseLostError(BusError):
    """The lease passed to another owner; this process must stop acting under it."""


class NoSlotError(BusError):
    """All places of a bounded number are held, for as long as somebody waited."""


class StoreLockedError(BusError):
    """Another nats-server holds this store; two servers on one store corrupt it."""


class StoreAlteredError(BusError):
    """The store's files are not as its server left them: altered, truncated or missing."""


class ServerStartError(BusError):
    """The embedded nats-server did not become ready; its last log lines are in the message."""


class BlobMissingError(BusError):
    """A blob that a message refers to is not where it should be."""


class BlobAlteredError(BusError):
    """A blob's bytes do not have the digest that its name says."""


class BlobUnreachableError(BlobMissingError):
    """No store that may hold a blob answered within the deadline: it may be there, and the reader may try again."""


class BlobRefusedError(BusError):
    """A blob store answered and refused: a wrong token, or a request that it does not know."""


class BlobNoRoomError(BusError):
    """The disk of a blob store is full; the writer waits."""


class BlobReplicasError(BusError):
    """Fewer stores than `blobs.replicas` made a blob durable within the deadline."""
