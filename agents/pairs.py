"""A request on a prefill and a decode server: both get it, under one bootstrap room; the prefill server's answer says with
which weights the prompt was read and the first token made, the decode server's holds all tokens.

    client --{bootstrap_host, _port, _room}--> prefill --KV, first token--> decode --> tokens 0..N
       `--------the same body----------------------------------------------->`

Invariant (`exact`): only tokens that both made with the weights that both announced before the request are kept: KV of one
version under another never makes a token that is trained. Each server takes versions at its own moment, so the rest is made
again behind the tokens that are kept. Not exact (`pause: in_place`): all are kept, with the label of who made them.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, Literal

import msgspec

from physarum.agents.engine_wire import Reply
from physarum.agents.errors import EngineError, EngineReplyError
from physarum.bus.version import Span, append_span

_ROOM_BITS: Final = 63
"""SGLang keeps a room as a signed 64-bit number."""
_EXCERPT_CHARS: Final = 300


class Prefill(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill server of a pair: its URL and instance, and where decode servers ask for KV."""

    url: str
    instance: str
    host: str
    port: int
    exact: bool = True


class PrefillError(EngineError):
    """The prefill server failed (`cause`), or does not hold the weights that it announced (`cause` None): the other half is
    let go, and both are asked anew."""

    def __init__(self, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class MovedError(EngineError):
    """No token of the reply was made with the weights that the pair announced: it is made again."""


class Prefilled(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefill server said of its half. `versions`: every label under which it held the request; `first`: the one that
    made the first token; `token`: that token, None where the release does not say."""

    versions: frozenset[str]
    first: str
    token: int | None
    aborted: bool


class _Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: str
    weight_versions: list[_VersionSpan] | None = None


class _Body(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] = []


_DECODER: Final = msgspec.json.Decoder(_Body)


def room_at(prefill: Prefill) -> dict[str, Any]:
    """What both servers are told beside the request. A room is used once: two requests in one would take each other's KV."""
    return {
        "bootstrap_host": prefill.host,
        "bootstrap_port": prefill.port,
        "bootstrap_room": secrets.randbits(_ROOM_BITS) or 1,  # 0 stands for a slot that is empty
    }


def parse_prefilled(body: bytes, url: str) -> Prefilled:
    """Raises EngineReplyError for what is not a reply of /generate."""
    try:
        decoded = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise EngineReplyError(
            f"prefill server {url} answered HTTP 200 with something that is not a reply of /generate: {error};"
            f" the body begins {body[:_EXCERPT_CHARS]!r}"
        ) from error
    meta = decoded.meta_info
    spans = meta.weight_versions or []
    made = [span.version for span in spans if span.end > span.start]
    return Prefilled(
        versions=frozenset([meta.weight_version, *(span.version for span in spans)]),
        first=made[0] if made else meta.weight_version,
        token=decoded.output_ids[0] if decoded.output_ids else None,
        aborted=meta.finish_reason.type == "abort",
    )


def check_prefilled(found: Prefilled, prefill: Prefill, version: str) -> None:
    """Raises PrefillError where the decode server's tokens could not be kept; asked as soon as the prefill server answers."""
    if found.aborted:
        raise PrefillError(f"prefill server {prefill.instance} aborted the request")
    if prefill.exact and found.versions != {version}:
        held = ", ".join(sorted(found.versions))
        raise PrefillError(
            f"prefill server {prefill.instance} held the request under {held}; it had announced {version}"
        )


def joined(reply: Reply, found: Prefilled, prefill: Prefill, version: str) -> Reply:
    """The reply of the pair: `reply` of the decode server as far as it may be kept. A reply that is cut counts as aborted.

    Raises MovedError where nothing is left, EngineReplyError where the two speak of different requests.
    """
    if len(reply.token_ids) and found.token is not None and int(reply.token_ids[0]) != found.token:
        raise EngineReplyError(
            f"prefill server {prefill.instance} made the first token {found.token}, the decode server's reply begins with"
            f" {int(reply.token_ids[0])}; expected the same: they do not belong together"
        )
    if not prefill.exact:
        if reply.conservative:
            return reply  # of a release that does not say which token is whose
        return msgspec.structs.replace(reply, spans=_from(found.first, reply.spans))
    kept = _leading(reply.spans, version)
    if kept == len(reply.token_ids):
        return reply
    if not kept:
        raise MovedError(f"the decode server made all tokens with other weights than {version}, which it had announced")
    return msgspec.structs.replace(
        reply,
        token_ids=reply.token_ids[:kept],
        logprobs=reply.logprobs[:kept],
        spans=[Span(version, 0, kept)],
        finish_reason="abort",
    )


def _leading(spans: list[Span], version: str) -> int:
    """Tokens before the first of another version."""
    return spans[0].end if spans and spans[0].version == version else 0


def _from(first: str, spans: list[Span]) -> list[Span]:
    """The same spans, where the first token carries `first`."""
    if not spans or spans[0].version == first:
        return spans
    found: list[Span] = []
    append_span(found, first, 1)
    append_span(found, spans[0].version, spans[0].end - 1)
    for span in spans[1:]:
        append_span(found, span.version, span.end - span.start)
    return found
