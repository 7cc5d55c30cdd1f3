"""How tasks and executions travel: subjects, message ids, headers, and bytes by reference above the inline limit.

The message id of an execution is its own id, so a publish repeated after a crash or a lost acknowledgement is stored
once within the server's window, and recognised by its reader beyond it.
"""

from __future__ import annotations

import logging
from typing import Final, Literal

import msgspec

from physarum.actors.context import Context
from physarum.bus import names
from physarum.bus.blobs import BlobRef, digest
from physarum.bus.codec import decode, encode
from physarum.bus.errors import (
    BlobAlteredError,
    BlobMissingError,
    BlobUnreachableError,
    CodecError,
    HeaderTooLargeError,
    RecordError,
)
from physarum.bus.names import BLOB_HEADER, RECORD_HEADER, SCORES_HEADER
from physarum.bus.publisher import PubAck
from physarum.bus.records import (
    Begun,
    Execution,
    ExecutionHeader,
    SampleScore,
    Task,
    execution_header,
    scores_of,
    with_scores,
)
from physarum.configs.root import RootConfig

_log = logging.getLogger(__name__)

_SCORES_BYTES: Final = 16 << 10
"""Scores above this travel in the body."""
_HEADERS_BYTES: Final = 60 << 10
"""NATS refuses headers above 64 KiB; ids and references take the rest."""

ExecutionStream = Literal["episodes", "samples", "evals"]


def purpose(task: Task) -> str:
    """The subject token that keeps evaluation apart from training."""
    return "eval" if task.task_class == "eval" else "train"


def episode_kind(config: RootConfig, task: Task) -> str:
    """The token that says in EPISODES who scores it: nobody else leases it."""
    if task.task_class == "eval" or config.reward.partitions == (None,):
        return purpose(task)
    return names.training(names.partition_of(task.group, len(config.reward.partitions)))


async def publish_task(context: Context, task: Task) -> PubAck:
    """Stores a task; waits while TASKS is full."""
    subject = names.subject(context.bus.run, "tasks", task.task_class, task.id)
    return await context.publisher.publish(subject, encode(task), message_id=f"task/{task.id}")


async def publish_partial(context: Context, task: Task, begun: list[Begun]) -> PubAck:
    """Stores an interrupted task with what it generated, in the class that is taken first; `begun` travels by reference
    when it is large, so that a task stays small for whoever only counts it."""
    partial = msgspec.structs.replace(task, task_class="partial", begun=begun, interruptions=task.interruptions + 1)
    subject = names.subject(context.bus.run, "tasks", "partial", task.id)
    message_id = f"task/{task.id}/{partial.interruptions}"
    body = encode(partial)
    if len(body) <= context.config.bus.inline_limit_bytes:
        return await context.publisher.publish(subject, body, message_id=message_id)
    body = encode(msgspec.structs.replace(partial, begun=[]))
    async with context.blobs.held(encode(begun), context.draining) as ref:
        headers = {BLOB_HEADER: msgspec.json.encode(ref).decode()}
        subject = names.by_reference(subject, ref.digest)
        return await context.publisher.publish(subject, body, message_id=message_id, headers=headers)


async def read_task(context: Context, headers: dict[str, str], data: bytes) -> Task:
    """A task with what its interrupted runs generated; generations that are gone are made again.

    Raises CodecError, or what says that the generations may be read later: BlobUnreachableError, BlobRefusedError, OSError.
    """
    task = decode(data, Task)
    ref = reference(headers)
    if ref is None:
        return task
    try:
        return msgspec.structs.replace(task, begun=decode(await context.blobs.get(ref), list[Begun]))
    except BlobUnreachableError:
        raise
    except (BlobMissingError, BlobAlteredError) as error:
        _log.warning("task %s begins again, what it had generated is gone: %s", task.id, error)
        return task


async def publish_execution(
    context: Context, key: ExecutionStream, execution: Execution, compared: tuple[int, ...] | None = None
) -> PubAck:
    """Stores an execution with its header; a large body is made durable in the blob stores first, and kept there until the
    message that refers to it is stored. Raises CodecError for what has no wire form, HeaderTooLargeError among them."""
    body = encode(execution)
    headers = {RECORD_HEADER: _record_header(execution, digest(body), compared)}
    kind = episode_kind(context.config, execution.task) if key == "episodes" else purpose(execution.task)
    subject = names.subject(context.bus.run, key, kind, execution.task.id)
    message_id = f"{key}/{execution.id}"
    if len(body) <= context.config.bus.inline_limit_bytes:
        return await context.publisher.publish(subject, body, message_id=message_id, headers=headers)
    async with context.blobs.held(body, context.draining) as ref:
        headers[BLOB_HEADER] = msgspec.json.encode(ref).decode()
        subject = names.by_reference(subject, ref.digest)
        return await context.publisher.publish(subject, b"", message_id=message_id, headers=headers)


async def publish_scored(
    context: Context,
    key: ExecutionStream,
    execution: Execution,
    headers: dict[str, str],
    data: bytes,
    compared: tuple[int, ...] | None = None,
) -> PubAck:
    """Stores what `headers` and `data` of EPISODES hold, scored: the body (or the blob) is the very same, the scores are in
    the header; where they are too large for it, they are in a new body. `execution`: the body with its scores; `compared`: as
    ExecutionHeader has it.

    Raises HeaderTooLargeError."""
    found = {
        RECORD_HEADER: _record_header(execution, read_header(headers).digest, compared),
        SCORES_HEADER: msgspec.json.encode(scores_of(execution)).decode(),
    }
    if _size(found[SCORES_HEADER]) > _SCORES_BYTES or sum(map(_size, found.values())) > _HEADERS_BYTES:
        return await publish_execution(context, key, execution, compared)
    subject = names.subject(context.bus.run, key, purpose(execution.task), execution.task.id)
    ref = reference(headers)
    if ref is not None:
        found[BLOB_HEADER] = headers[BLOB_HEADER]
        subject = names.by_reference(subject, ref.digest)
    return await context.publisher.publish(subject, data, message_id=f"{key}/{execution.id}", headers=found)


def _record_header(execution: Execution, body_digest: str, compared: tuple[int, ...] | None) -> str:
    text = msgspec.json.encode(execution_header(execution, body_digest, compared)).decode()
    if _size(text) > _HEADERS_BYTES:
        spans = sum(len(sample.spans) for sample in execution.samples)
        raise HeaderTooLargeError(
            f"execution {execution.id} of {len(execution.samples)} samples with {spans} spans needs a header of"
            f" {_size(text)} bytes; expected at most {_HEADERS_BYTES}. Let an episode return fewer samples"
        )
    return text


def _size(text: str) -> int:
    return len(text.encode())


def read_header(headers: dict[str, str]) -> ExecutionHeader:
    """The header of an EPISODES, SAMPLES or EVALS message. Raises CodecError when it is absent or malformed."""
    text = headers.get(RECORD_HEADER)
    if text is None:
        raise CodecError(
            f"message {headers.get(names.MESSAGE_ID_HEADER)} has no {RECORD_HEADER} header; expected schema v1"
        )
    try:
        return msgspec.json.decode(text.encode(), type=ExecutionHeader)
    except msgspec.DecodeError as error:
        raise CodecError(f"header {RECORD_HEADER} is not schema v1: {error}") from error


def reference(headers: dict[str, str]) -> BlobRef | None:
    """Where the body is when it travels by reference. Raises CodecError when the header is malformed."""
    text = headers.get(BLOB_HEADER)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text.encode(), type=BlobRef)
    except msgspec.DecodeError as error:
        raise CodecError(f"header {BLOB_HEADER} is no reference to a blob: {error}") from error


async def read_body(context: Context, headers: dict[str, str], data: bytes) -> bytes:
    """The encoded execution, fetched from the blob stores where it travels by reference. Raises CodecError or a blob error."""
    ref = reference(headers)
    return data if ref is None else await context.blobs.get(ref)


async def read_execution(context: Context, headers: dict[str, str], data: bytes) -> Execution:
    """The execution, with its scores. Raises CodecError or a blob error."""
    return decode_execution(headers, await read_body(context, headers, data))


def decode_execution(headers: dict[str, str], body: bytes) -> Execution:
    """The execution of an encoded body and its message's headers. Raises CodecError."""
    execution = decode(body, Execution)
    text = headers.get(SCORES_HEADER)
    if text is None:
        return execution
    try:
        return with_scores(execution, msgspec.json.decode(text.encode(), type=list[SampleScore]))
    except (msgspec.DecodeError, RecordError) as error:
        raise CodecError(f"header {SCORES_HEADER} of {execution.id} is not its scores: {error}") from error
