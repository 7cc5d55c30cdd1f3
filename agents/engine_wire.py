"""SGLang's POST /generate as bytes: requests built, replies validated at the edge (sglang 0.5.15.post1 and 0.5.23).

Invariant: `parse_reply` returns as many log-probabilities as tokens and spans that cover them, or raises. Where the
engine's report is not one to one with its tokens, log-probabilities are NaN and the flaw is named: never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from physarum.agents.choices import Capture, Experts, kept_rows
from physarum.agents.errors import EngineReplyError, SamplingError
from physarum.agents.protocols import FinishReason
from physarum.bus.engine_choices import KeptTokens
from physarum.bus.version import Span, append_span

Flaw = Literal["logprobs_count", "logprobs_token_mismatch", "logprobs_missing", "spans_incomplete", "prompt_altered"]

# 0.5.23 answers a request that was aborted while it waited without prompt_tokens; 0 stands for "not said".
_NOT_SAID: Final = 0
_EXCERPT_CHARS: Final = 300


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """One validated reply: N tokens int32, N log-probabilities float32, spans over [0, N)."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: list[Span]
    finish_reason: FinishReason
    cached_tokens: int
    flaw: Flaw | None
    conservative: bool = False
    """The engine did not say which version made which token: all carry the oldest that may have."""
    retractions: int = 0
    """How often the engine gave up its KV and computed it again."""
    experts: Experts | None = None
    experts_start: int = 0
    """Rows [experts_start, P + N - 1) of a prompt of P tokens."""
    kept: KeptTokens | None = None


class Finish(msgspec.Struct):
    type: FinishReason
    status_code: int | None = None
    message: str | None = None


class VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class Said(msgspec.Struct, kw_only=True):
    """What every meta_info may hold, at the end of a generation or in the midst of it."""

    weight_version: str
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    prompt_tokens: int = _NOT_SAID
    cached_tokens: int = 0
    num_retractions: int = 0
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None


class Meta(Said, kw_only=True):
    finish_reason: Finish


class Body(msgspec.Struct):
    output_ids: list[int]
    meta_info: Meta


_DECODER: Final = msgspec.json.Decoder(Body)


def build_request(
    token_ids: npt.NDArray[np.int32],
    sampling: Mapping[str, Any],
    rid: str,
    extra_key: str | None,
    further: Mapping[str, Any] | None = None,
    stream_tokens: int | None = None,
) -> bytes:
    """The JSON body. `extra_key` partitions the engine's prefix cache; `further` fields are added as they are; with
    `stream_tokens` the answer comes in chunks of so many tokens (the first chunk has one). Raises SamplingError for what JSON
    cannot say."""
    interval = {} if stream_tokens is None else {"stream_interval": stream_tokens}
    request: dict[str, Any] = {
        "input_ids": token_ids,
        "sampling_params": {**sampling, **interval},
        "return_logprob": True,
        "rid": rid,
        "stream": stream_tokens is not None,
        **(further or {}),
    }
    if extra_key is not None:
        request["extra_key"] = extra_key
    try:
        return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise SamplingError(
            f"sampling parameters {dict(sampling)} cannot be written as JSON: {error}; expected text, numbers, lists, and"
            ' objects with text as keys, for example {"logit_bias": {"5": 1.0}}'
        ) from None


def parse_reply(
    body: bytes,
    url: str,
    prompt_len: int,
    single_version: Callable[[str], str],
    capture: Capture | None = None,
    routed_from: int = 0,
) -> Reply:
    """Validate a 200 body. Raises EngineReplyError when it is not a reply of /generate at all.

    `single_version` maps the only label that engines without `weight_versions` report (the one live at the *end*) to
    the label that all tokens of the reply shall carry. `capture`, `routed_from`: what was asked for besides; a record that does
    not fit the tokens is none.
    """
    try:
        decoded = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineReplyError(
            f"engine {url} answered HTTP 200 with something that is not a reply of /generate: {error};"
            f" the body begins {body[:_EXCERPT_CHARS]!r}. Expected SGLang 0.5.15.post1 or 0.5.23 behind this URL"
        ) from error
    return validated(decoded, prompt_len, single_version, capture, routed_from)


def validated(
    decoded: Body,
    prompt_len: int,
    single_version: Callable[[str], str],
    capture: Capture | None = None,
    routed_from: int = 0,
) -> Reply:
    """`parse_reply` of what was read already."""
    meta, count = decoded.meta_info, len(decoded.output_ids)
    spans = _spans(meta, count, single_version)
    flaw = _flaw(decoded, prompt_len, spans)
    spans = spans if _cover(spans, count) else _whole(single_version(meta.weight_version), count)
    values = [entry[0] for entry in meta.output_token_logprobs]  # None becomes NaN
    whole = flaw is None or flaw == "logprobs_missing"
    sound = flaw != "prompt_altered"
    return Reply(
        token_ids=np.asarray(decoded.output_ids, dtype=np.int32),
        logprobs=np.asarray(values, dtype=np.float32) if whole else np.full(count, np.nan, dtype=np.float32),
        spans=spans,
        finish_reason=meta.finish_reason.type,
        cached_tokens=meta.cached_tokens,
        flaw=flaw,
        conservative=meta.weight_versions is None,
        retractions=meta.num_retractions,
        experts=_experts(meta, capture, prompt_len + count - 1 - routed_from) if sound else None,
        experts_start=routed_from,
        kept=_kept(meta, capture, count) if sound else None,
    )


def _experts(meta: Said, capture: Capture | None, rows: int) -> Experts | None:
    if capture is None or meta.routed_experts is None:
        return None
    return capture.experts_of(meta.routed_experts, rows)


def _kept(meta: Said, capture: Capture | None, count: int) -> KeptTokens | None:
    if capture is None or not capture.nucleus or meta.output_token_sampling_mask is None:
        return None
    return kept_rows(meta.output_token_sampling_mask, count)


def _flaw(body: Body, prompt_len: int, spans: list[Span]) -> Flaw | None:
    """The first reason for which (some) tokens of this reply may not be trained."""
    meta = body.meta_info
    entries = meta.output_token_logprobs
    if meta.prompt_tokens not in (prompt_len, _NOT_SAID):
        return "prompt_altered"  # for example --allow-auto-truncate
    if len(entries) != len(body.output_ids):
        return "logprobs_count"
    if any(entry[1] != token for entry, token in zip(entries, body.output_ids, strict=True)):
        return "logprobs_token_mismatch"
    if not _cover(spans, len(body.output_ids)):
        return "spans_incomplete"
    if any(entry[0] is None for entry in entries):
        return "logprobs_missing"
    return None


def _spans(meta: Said, count: int, single_version: Callable[[str], str]) -> list[Span]:
    """0.5.23 reports every version with its range, also an empty one for a request that never ran."""
    if meta.weight_versions is None:
        return _whole(single_version(meta.weight_version), count)
    return [Span(span.version, span.start, span.end) for span in meta.weight_versions if span.end > span.start]


def _whole(version: str, count: int) -> list[Span]:
    spans: list[Span] = []
    append_span(spans, version, count)
    return spans


def _cover(spans: list[Span], count: int) -> bool:
    """Do `spans` cover [0, count) in order, without gap or overlap?"""
    end = 0
    for span in spans:
        if span.start != end or span.end <= span.start:
            return False
        end = span.end
    return end == count
