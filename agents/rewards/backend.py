"""A service that scores, as one hook process asks it: bounded in rate, number, tries, time, size and memory.

    post(question) --cache--> turn (rate) --> slot (number) --> POST --200--> cache
                                                                  | timeout, lost connection, 5xx: back off, at most `attempts`
                                                                  +- 4xx, redirect: BackendRefusedError, never again

Invariant: each `post` ends within `deadline_s`, and nothing but the cache is left behind. What is cached are the scores
read from replies, by the blake2b digest of service and body, the oldest use dropped first; never a failure. Secrets come
from the environment, and are in no message.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from physarum.agents.connections import open_session
from physarum.agents.engine_key import engine_key
from physarum.agents.retries import Retries, RetryPolicy
from physarum.agents.rewards.errors import BackendRefusedError, BackendReplyError, BackendUnavailableError
from physarum.configs.reward_types import BackendReward, RemoteReward, ServedReward
from physarum.configs.secrets import read_secret

_SHOWN: Final = 200
"""Characters of a service's answer in a message."""
_ABSENT_S: Final = 0.5
"""Between looks for an engine that is being started: the file with its address announces nothing."""


class Pace:
    """Evenly spaced turns, `rate_per_s` of them in a second; they are handed out in order."""

    def __init__(self, rate_per_s: float | None) -> None:
        self._gap_s = 0.0 if rate_per_s is None else 1.0 / rate_per_s
        self._next_at = 0.0

    async def turn(self) -> None:
        """Waits until the next request may begin."""
        now = asyncio.get_running_loop().time()
        starts_at = max(now, self._next_at)
        self._next_at = starts_at + self._gap_s
        if starts_at > now:
            await asyncio.sleep(starts_at - now)


class Replies:
    """The last `entries` scores by what was asked."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._kept: OrderedDict[bytes, float | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def get(self, key: bytes) -> float | None:
        """Raises KeyError where it is not kept."""
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: bytes, score: float | None) -> None:
        if self._entries:
            self._kept[key] = score
            self._kept.move_to_end(key)
        while len(self._kept) > self._entries:
            self._kept.popitem(last=False)


Address = Callable[[], str | None]


class _FailedError(Exception):
    """5xx: worth another try."""


class Backend:
    """One service. Its session is opened at the first question and belongs to the loop of that moment."""

    def __init__(self, options: BackendReward, address: Address, name: str, rng: random.Random | None = None) -> None:
        """`address` gives the URL for the next request, None while there is none; `name` says in the cache which service it is.
        Raises SecretError when `token_env` names a variable that is not set."""
        self._options, self._address, self._name = options, address, name
        self._token = _token(options)
        self._pace = Pace(options.rate_per_s)
        self._slots = None if options.concurrency is None else asyncio.Semaphore(options.concurrency)
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self.replies = Replies(options.cache_entries)

    async def post(self, question: dict[str, Any], read: Callable[[Any], float | None], path: str = "") -> float | None:
        """What `read` makes of the JSON that the service answers to `question`; only what it could read is remembered.

        Raises BackendRefusedError, BackendUnavailableError (attempts or deadline used up), BackendReplyError (no JSON, or too
        much), and what `read` raises.
        """
        body = orjson.dumps(question, option=orjson.OPT_SORT_KEYS)
        key = hashlib.blake2b(f"{self._name}{path}\0".encode() + body, digest_size=16).digest()
        if key in self.replies:
            return self.replies.get(key)
        score = read(await self._tried(path, body))
        self.replies.put(key, score)
        return score

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _tried(self, path: str, body: bytes) -> Any:
        one = self._options
        policy = RetryPolicy(attempts=one.attempts, deadline_s=one.deadline_s, request_timeout_s=one.request_timeout_s)
        retries = Retries(policy, self._rng)
        while not retries.exhausted:
            address = self._address()
            if address is None:  # it is being started: that is no failed request
                retries.last = _FailedError("none is ready")
                await asyncio.sleep(min(_ABSENT_S, max(0.0, retries.remaining_s)))
                continue
            url = f"{address.rstrip('/')}{path}" if path else address
            try:
                async with asyncio.timeout(retries.remaining_s):
                    return await self._asked(url, body, retries)
            except (_FailedError, aiohttp.ClientError, TimeoutError) as error:
                retries.failed(error)
                if not retries.exhausted:
                    await retries.back_off()
        raise BackendUnavailableError(
            f"{self._name} gave no score in {retries.failures} of {one.attempts} requests and {one.deadline_s:g} s; the last"
            f" one: {type(retries.last).__name__}: {self._shown(str(retries.last))}"
        )

    async def _asked(self, url: str, body: bytes, retries: Retries) -> Any:
        await self._pace.turn()
        if self._slots is None:
            return await self._sent(url, body, retries.request_timeout_s)
        async with self._slots:
            return await self._sent(url, body, retries.request_timeout_s)

    async def _sent(self, url: str, body: bytes, timeout_s: float) -> Any:
        if self._session is None:
            self._session = open_session()
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        async with self._session.post(
            url, data=body, headers=headers, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=timeout_s)
        ) as response:
            text = await self._read(url, response)
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _FailedError(f"HTTP {response.status}: {self._shown(text.decode(errors='replace'))}")
        if response.status != HTTPStatus.OK:
            raise BackendRefusedError(
                f"{url} refused the question with HTTP {response.status}: {self._shown(text.decode(errors='replace'))};"
                " expected 200. It is not asked again: correct the address, the token or the rate limit"
            )
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            shown = self._shown(text.decode(errors="replace"))
            raise BackendReplyError(f"{url} answered {shown!r}; expected JSON ({error})") from error

    async def _read(self, url: str, response: aiohttp.ClientResponse) -> bytes:
        parts, size = [], 0
        async for part in response.content.iter_any():
            parts.append(part)
            size += len(part)
            if size > self._options.max_reply_bytes:
                response.close()
                raise BackendReplyError(
                    f"{url} answered more than max_reply_bytes = {self._options.max_reply_bytes}; expected a score"
                )
        return b"".join(parts)

    def _shown(self, text: str) -> str:
        shown = " ".join(text[:_SHOWN].split())
        return shown if self._token is None else shown.replace(self._token, "***")


_OPEN: Final[dict[str, Backend]] = {}


def _token(options: BackendReward) -> str | None:
    """The service's own, or the key of this run's engines."""
    if not isinstance(options, ServedReward) or options.engine is None or options.engines_token_env is None:
        return read_secret(options.token_env)
    token = read_secret(options.engines_token_env)
    return None if token is None else engine_key(token)


def backend_for(options: RemoteReward | ServedReward) -> Backend:
    """The one backend of this process for these options: limits and cache hold over all its calls."""
    key = f"{type(options).__name__} {options.model_dump_json()}"
    if key not in _OPEN:
        _OPEN[key] = opened(options)
    return _OPEN[key]


def opened(options: RemoteReward | ServedReward, rng: random.Random | None = None) -> Backend:
    """A backend of its own."""
    if isinstance(options, ServedReward) and options.engine is not None:
        return Backend(options, _of_engines(options), f"engine group {options.engine}", rng)
    url = str(options.url)
    return Backend(options, lambda: url, url, rng)


def _of_engines(options: ServedReward) -> Address:
    """One of the ready engines of the group by lot, as the reward actor last wrote them."""
    rng, file = random.Random(), Path(options.engines_file or os.devnull)

    def address() -> str | None:
        try:
            urls = orjson.loads(file.read_bytes()).get(options.engine)
        except (OSError, orjson.JSONDecodeError):
            return None
        return rng.choice(urls) if urls else None

    return address
