"""One request on the wire: of one engine, or of a prefill and a decode server together.

Invariant: whoever is of no use any more is let go by closing its connection, on which an engine aborts the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import aiohttp

from physarum.agents.engine_wire import Reply, parse_reply
from physarum.agents.errors import BrokenOffError, EngineFailedError, refusal
from physarum.agents.pairs import Prefill, Prefilled, PrefillError, check_prefilled, joined, parse_prefilled
from physarum.agents.routing import EngineRef
from physarum.agents.streaming import Events, Received

_JSON: Final = {"Content-Type": "application/json"}
_EVENTS: Final = "text/event-stream"
_BODY_EXCERPT_CHARS: Final = 500


async def post(
    session: aiohttp.ClientSession,
    base: str,
    request: bytes,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """The body of a 200 answer. Raises EngineRefusedError (4xx), EngineFailedError (5xx), and what aiohttp raises."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    url, sent = f"{base.rstrip('/')}/generate", {**_JSON, **(headers or {})}
    async with session.post(url, data=request, headers=sent, timeout=timeout, allow_redirects=False) as response:
        body = await response.read()
    if response.status == HTTPStatus.OK:
        return body
    raise refusal(base, response.status, body[:_BODY_EXCERPT_CHARS].decode(errors="replace"))


async def post_streamed(
    session: aiohttp.ClientSession,
    base: str,
    request: bytes,
    silence_s: float,
    limit_s: float,
    received: Received,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Fills `received` until its last chunk; what it holds when this raises was made all the same. `silence_s`: for how long
    nothing may come; `limit_s`: of the whole answer. A server that does not stream is taken at its one body.

    Raises what `post` does, EngineReplyError for what is no chunk, and BrokenOffError for an end before the last one.
    """
    timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=silence_s, sock_read=silence_s)
    url, sent = f"{base.rstrip('/')}/generate", {**_JSON, **(headers or {})}
    async with session.post(url, data=request, headers=sent, timeout=timeout, allow_redirects=False) as response:
        if response.status != HTTPStatus.OK:
            body = await response.read()
            raise refusal(base, response.status, body[:_BODY_EXCERPT_CHARS].decode(errors="replace"))
        if response.content_type != _EVENTS:
            received.take_whole(await response.read())
            return
        events = Events()
        async for piece in response.content.iter_any():
            for event in events.feed(piece):
                received.take(event)
            if received.finished:
                return  # what follows says only that nothing follows
    raise BrokenOffError(f"engine {base} ended its answer after {received.count} tokens and before the last chunk")


async def ask_pair(
    session: aiohttp.ClientSession,
    ref: EngineRef,
    request: bytes,
    length: int,
    timeout_s: float,
    prefilled: Callable[[], None],
) -> Reply:
    """The reply of both (pairs.py). `length`: of the prompt; `prefilled` is called when the prefill server has answered.

    Raises PrefillError for whatever is wrong there, MovedError, and for the decode server what `post` raises.
    """
    assert ref.prefill is not None
    # A label alone is the one at the reply's end: told, where tokens of another are dropped by it; else the oldest it may be.
    label = str if ref.prefill.exact else lambda _: ref.version
    decoding = asyncio.create_task(post(session, ref.url, request, timeout_s))
    prefilling = asyncio.create_task(_prefill(session, ref.prefill, request, timeout_s, ref.version, prefilled))
    try:
        await asyncio.wait({decoding, prefilling}, return_when=asyncio.FIRST_COMPLETED)
        if not prefilling.done():
            reply = parse_reply(decoding.result(), ref.url, length, label)
            if not len(reply.token_ids):
                return reply  # aborted before there was anything to go on from
        found = await prefilling
        return joined(parse_reply(await decoding, ref.url, length, label), found, ref.prefill, ref.version)
    finally:
        for task in (decoding, prefilling):
            task.cancel()
        await asyncio.gather(decoding, prefilling, return_exceptions=True)


async def _prefill(
    session: aiohttp.ClientSession,
    prefill: Prefill,
    request: bytes,
    timeout_s: float,
    version: str,
    prefilled: Callable[[], None],
) -> Prefilled:
    try:
        found = parse_prefilled(await post(session, prefill.url, request, timeout_s), prefill.url)
    except (EngineFailedError, aiohttp.ClientError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise PrefillError(f"prefill server {prefill.instance} failed: {why}", error) from error
    prefilled()
    check_prefilled(found, prefill, version)
    return found
