"""An answer of /generate that comes in chunks, so that what an engine made before it died is not lost with it.

    data: {"output_ids": [...], "meta_info": {completion_tokens, weight_version, output_token_logprobs, finish_reason: null}}
    data: {"output_ids": [...], "meta_info": {..., finish_reason: {...}, weight_versions: [...], routed_experts: "..."}}
    data: [DONE]

Invariant: a chunk counts when all of it is here and it has as many log-probabilities as tokens; `completion_tokens` says which
of its tokens are new, so none is taken twice and none is skipped, whether chunks hold what is new (SGLang's
--incremental-streaming-output) or everything so far. An answer that ends in order is what it were in one piece.

Versions. Only the last chunk has spans; those before it have the label that the engine serves when they leave it. An engine's
actor sets that label before the first token of new weights can be made (pause, update, label, go on), so a token that leaves
under the label that was announced before the request was made with exactly these weights. Later ones may be of these or newer:
they carry the announced label, the oldest, and the reply is conservative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from physarum.agents.choices import Capture
from physarum.agents.engine_wire import Body, Finish, Meta, Reply, Said, parse_reply, validated
from physarum.agents.errors import EngineReplyError, refusal

T = TypeVar("T")

_END: Final = b"\n\n"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_EXCERPT_CHARS: Final = 300
_CLIENT_ERROR: Final = 400


class Events:
    """Bytes to the data of server-sent events, wherever they were cut; an event that was not ended is none."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._seen = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that `piece` ends."""
        self._rest += piece
        found, begin = [], 0
        while (end := self._rest.find(_END, max(begin, self._seen))) >= 0:
            event = bytes(self._rest[begin:end])
            begin, self._seen = end + len(_END), 0
            if event.startswith(_DATA):  # else a comment, with which a proxy keeps the connection open
                found.append(event[len(_DATA) :].strip())
        del self._rest[:begin]
        self._seen = max(0, len(self._rest) - len(_END) + 1)
        return found


class _Error(msgspec.Struct):
    message: str = ""
    code: int = _CLIENT_ERROR


class _ChunkMeta(Said, kw_only=True):
    finish_reason: Finish | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    meta_info: _ChunkMeta | None = None
    output_ids: list[int] = []
    error: _Error | None = None


_DECODER: Final = msgspec.json.Decoder(_Chunk)


class Received:
    """What came of one answer so far. `announced`: the version that the engine named before the request."""

    def __init__(self, url: str, announced: str) -> None:
        self._url, self._announced = url, announced
        self._ids: list[int] = []
        self._logprobs: list[tuple[float | None, int, str | None]] = []
        self._masks: list[list[int]] | None = []
        self._sound = 0
        self._exact = 0
        self._last: _ChunkMeta | None = None
        self._repeats: bool | None = None
        self._whole: bytes | None = None

    @property
    def count(self) -> int:
        return len(self._ids)

    @property
    def finished(self) -> bool:
        return self._whole is not None or (self._last is not None and self._last.finish_reason is not None)

    def take_whole(self, body: bytes) -> None:
        """The answer of a server that did not stream."""
        self._whole = body

    def take(self, event: bytes) -> None:
        """One event's data. Raises EngineReplyError for what is no chunk of this answer; for an error that is sent as an event,
        what its status would have raised as an answer."""
        if event == _DONE or self.finished:
            return
        try:
            chunk = _DECODER.decode(event)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"{error}; it begins {event[:_EXCERPT_CHARS]!r}") from error
        if chunk.error is not None:
            raise refusal(self._url, chunk.error.code, chunk.error.message)
        if (meta := chunk.meta_info) is None:
            raise self._damaged(f"it has no meta_info and begins {event[:_EXCERPT_CHARS]!r}")
        if meta.finish_reason is not None and (meta.finish_reason.status_code or 0) >= _CLIENT_ERROR:
            raise refusal(self._url, meta.finish_reason.status_code or 0, meta.finish_reason.message or "")
        self._add(chunk.output_ids, meta)

    def reply(
        self,
        prompt_len: int,
        single_version: Callable[[str], str],
        capture: Capture | None = None,
        routed_from: int = 0,
    ) -> Reply:
        """The whole answer, as parse_reply has it."""
        if self._whole is not None:
            return parse_reply(self._whole, self._url, prompt_len, single_version, capture, routed_from)
        assert self._last is not None and self._last.finish_reason is not None
        body = self._body(self.count, self._last.finish_reason)
        return validated(body, prompt_len, single_version, capture, routed_from)

    def partial(self, prompt_len: int, capture: Capture | None = None, *, exact: bool = False) -> Reply | None:
        """What came before the answer broke off, as an aborted reply; None for nothing. `exact`: only what is certainly of the
        announced weights. What it replayed inside the engine is not said, and its experts are not: whoever goes on reports
        them, since the tokens are then inputs.

        Only the last chunk holds a stop token, so that one may go on behind these.
        """
        count = min(self._sound, self._exact) if exact else self._sound
        if self._last is None or self.finished or not count:
            return None
        body = self._body(count, Finish("abort"))
        body.meta_info.weight_versions, body.meta_info.routed_experts, body.meta_info.num_retractions = None, None, 0
        reply = validated(body, prompt_len, lambda label: self._announced, capture)
        if reply.flaw not in (None, "logprobs_missing"):
            return None
        return msgspec.structs.replace(reply, conservative=count > self._exact)

    def _add(self, ids: list[int], meta: _ChunkMeta) -> None:
        held, total = self.count, meta.completion_tokens
        aborted = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if total is None:  # 0.5.23 says it always; an abort of a request that waits may only repeat what was sent
            if not aborted:
                raise self._damaged("it does not say completion_tokens")
            total = held
        new = total - held
        if new < 0 or len(ids) < new or (len(ids) > new and not (self._is_whole(ids, meta, total) or aborted)):
            raise self._damaged(f"it holds {len(ids)} tokens of {total}, behind {held} that came before")
        fresh = ids[held:] if len(ids) > new and self._is_whole(ids, meta, total) else ids[:new]
        if held and new and not aborted:
            self._repeats = len(ids) > new
        logprobs = _new(meta.output_token_logprobs, held, total, aborted)
        if self._sound == held and [entry[1] for entry in logprobs] == fresh:
            self._sound = total
        self._ids += fresh
        self._logprobs += logprobs
        if new:
            masks = _new(meta.output_token_sampling_mask or [], held, total, aborted)
            if self._masks is not None and len(masks) == new:
                self._masks += masks
            else:
                self._masks = None
        if meta.weight_version == self._announced and self._exact == held:
            self._exact = total
        self._last = meta

    def _is_whole(self, ids: list[int], meta: _ChunkMeta, total: int) -> bool:
        """Does this chunk hold everything so far? SGLang repeats the last token with an abort, whatever its chunks hold."""
        if self._repeats is not None:
            return self._repeats and len(ids) == total
        return len(ids) == total == len(meta.output_token_logprobs) and ids[: self.count] == self._ids

    def _body(self, count: int, finish: Finish) -> Body:
        said: dict[str, Any] = {name: getattr(self._last, name) for name in Said.__struct_fields__}
        said["output_token_logprobs"] = self._logprobs[: count if count < self.count else None]
        said["output_token_sampling_mask"] = None if self._masks is None else self._masks[:count]
        return Body(self._ids[:count], Meta(finish_reason=finish, **said))

    def _damaged(self, why: str) -> EngineReplyError:
        return EngineReplyError(
            f"engine {self._url} sent a chunk that does not belong to its answer: {why}. Expected SGLang 0.5.15.post1 or 0.5.23"
            " behind this URL; `rollout.stream_tokens: null` asks for answers in one piece"
        )


def _new(items: list[T], held: int, total: int, aborted: bool) -> list[T]:
    """Of a list that holds either everything so far or what is new, and with an abort both; of another length: nothing."""
    if len(items) == total:
        return items[held:]
    fits = len(items) >= total - held if aborted else len(items) == total - held
    return items[: total - held] if fits else []
