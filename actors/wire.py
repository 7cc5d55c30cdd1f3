"""How tasks and executions travel: subjects, message ids, headers, and bytes by reference above the inline limit.

The message id of an execution is its own id, so a publish repeated after a crash or a lost acknowledgement is stored
once within the server's window, and recognised by its reader beyond it.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from physarum.actors.context import Context
from physarum.bus import names, room
from physarum.bus.blobs import BlobRef, digest
from physarum.bus.codec import decode, encode
from physarum.bus.errors import CodecError
from physarum.bus.names import BLOB_HEADER, RECORD_HEADER
from physarum.bus.publisher import PubAck
from physarum.bus.records import Execution, ExecutionHeader, Task, execution_header

ExecutionStream = Literal["episodes", "samples", "evals"]


def purpose(task: Task) -> str:
    """The subject token that keeps evaluation apart from training."""
    return "eval" if task.task_class == "eval" else "train"


async def publish_task(context: Context, task: Task) -> PubAck:
    """Stores a task; waits while TASKS is full."""
    subject = names.subject(context.bus.run, "tasks", task.task_class, task.id)
    return await context.publisher.publish(subject, encode(task), message_id=f"task/{task.id}")


async def publish_execution(context: Context, key: ExecutionStream, execution: Execution) -> PubAck:
    """Stores an execution with its header; a large body is made durable in the blob store first."""
    body = encode(execution)
    headers = {RECORD_HEADER: msgspec.json.encode(execution_header(execution, digest(body))).decode()}
    if len(body) > context.config.bus.inline_limit_bytes:
        ref = await _store_blob(context, body)
        headers[BLOB_HEADER] = msgspec.json.encode(ref).decode()
        body = b""
    subject = names.subject(context.bus.run, key, purpose(execution.task), execution.task.id)
    return await context.publisher.publish(subject, body, message_id=f"{key}/{execution.id}", headers=headers)


async def _store_blob(context: Context, body: bytes) -> BlobRef:
    """Waits while the disk is full; an execution that was made is not given up for that. Raises other OSErrors."""
    while True:
        try:
            return await asyncio.to_thread(context.folder.blobs.put, body)
        except OSError as error:
            if not room.is_full(error) or not await room.until_room(context.folder.path, "a blob", context.draining):
                raise


def read_header(headers: dict[str, str]) -> ExecutionHeader:
    """The header of an EPISODES, SAMPLES or EVALS message. Raises CodecError when it is absent or malformed."""
    text = headers.get(RECORD_HEADER)
    if text is None:
        raise CodecError(f"message {headers.get(names.MESSAGE_ID_HEADER)} has no {RECORD_HEADER} header; expected schema v1")
    try:
        return msgspec.json.decode(text.encode(), type=ExecutionHeader)
    except msgspec.DecodeError as error:
        raise CodecError(f"header {RECORD_HEADER} is not schema v1: {error}") from error


async def read_execution(context: Context, headers: dict[str, str], data: bytes) -> Execution:
    """The body, fetched from the blob store where it travels by reference. Raises CodecError or a blob error."""
    reference = headers.get(BLOB_HEADER)
    if reference is not None:
        ref = msgspec.json.decode(reference.encode(), type=BlobRef)
        data = await asyncio.to_thread(context.folder.blobs.get, ref)
    return decode(data, Execution)
