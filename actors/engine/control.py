"""SGLang's control interface: every call has a deadline, every failure a name, and no call ever aborts a request but the two
that say so.

Weight updates and the KV cache, found by experiment on 0.5.23 (tests/contract/test_sglang_update.py keeps it true) and
on 0.5.15.post1. A prompt's KV enters the radix cache as soon as it is prefilled, under (extra_key, tokens). After
pause(retract) -> new weights -> continue, *without* a flush, log-probabilities of the new span are off by about 10 nats
on a random model: the requests prefill again, but match their own prompt's old KV. `cached_tokens` hides this: it
counts the first prefill only and stays 0. extra_key=version protects new requests, but not the resumed ones, which keep
the key they came with.

| release | pause | flush_cache inside the update | without flush, cache on | disable-radix-cache |
|---|---|---|---|---|
| 0.5.23 | retract | works while requests are queued: the KV of all is free | old KV serves new tokens | safe |
| 0.5.23 | in_place | refused (400) while anything runs | new requests need extra_key=version | safe |
| 0.5.15.post1 | retract | kills the server while anything is queued | old KV serves new tokens | safe |

So `retract` flushes where the release can (7 ms on CPU; /flush_cache takes 0.36 s there, because it also collects
garbage: the update's own flush with torch_empty_cache=false does not), and is refused where it cannot, unless the radix
cache is off. `in_place` never flushes and needs either extra_key or no radix cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from physarum.actors.engine.errors import (
    EngineAnswerError,
    EngineCapabilityError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from physarum.agents.engine_key import bearer
from physarum.weightsync.target import PauseMode

# Tried on 0.5.23 and on 0.5.15.post1; a release between them counts as the older one.
_FLUSHES_WHILE_QUEUED: Final = (0, 5, 23)
_REPORTS_SPANS: Final = (0, 5, 23)
_BODY_IN_MESSAGE: Final = 500


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What the running server can do, as it says itself."""

    version: str
    spans: bool
    extra_key: bool
    flush_while_queued: bool
    radix_cache: bool
    update_sessions: bool
    """Whether weights that come as tensors need a session round them."""
    ranks: int
    """Tensor-parallel ranks, each of which gets its own payload."""
    replicated: bool = False
    """It has data-parallel replicas or pipeline stages."""
    own_draft: bool = False
    """It drafts with another model than its own."""
    longest_tokens: int | None = None
    """What one request can hold at most, prompt and answer, where the server says so."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and tokens in the server, summed over its data-parallel ranks. What a release does not report is None (or 0)."""

    running: int
    waiting: int
    used_tokens: int
    token_usage: float
    generated_tokens_per_s: float
    capacity_tokens: int | None = None
    running_at_most: int | None = None
    waiting_tokens: int | None = None
    """Of waiting requests, still to be prefilled."""
    prefilled_tokens: int | None = None
    """Since the start."""
    retracted: int = 0
    """Requests put back for want of KV in the server's last interval of statistics."""


class EngineControl:
    """Speaks to one server at `base_url`. `timeout_s` bounds each call, `update_timeout_s` a weight update; `key` is sent with
    each, where the server asks for one."""

    def __init__(
        self,
        base_url: str,
        session: aiohttp.ClientSession,
        timeout_s: float = 10.0,
        update_timeout_s: float = 60.0,
        key: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._session = session
        self._headers = bearer(key)
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s
        self._capabilities: Capabilities | None = None

    async def health(self) -> None:
        """Returns when the server generates (an idle one makes a token for it, which takes a second)."""
        await self._call("GET", "/health")

    async def server_info(self) -> dict[str, Any]:
        return _mapping(await self._call("GET", "/server_info"), "/server_info")

    async def model_info(self) -> dict[str, Any]:
        return _mapping(await self._call("GET", "/model_info"), "/model_info")

    async def tokens_of(self, text: str) -> list[int]:
        """As the server's tokenizer cuts it, without special tokens of its own. Raises EngineRefusedError where it has none."""
        body = {"prompt": text, "add_special_tokens": False}
        tokens = _mapping(await self._call("POST", "/tokenize", body), "/tokenize").get("tokens")
        if not isinstance(tokens, list):
            raise EngineAnswerError(
                f"{self.base_url}/tokenize holds no list of tokens: {str(tokens)[:_BODY_IN_MESSAGE]}"
            )
        return tokens

    async def live_label(self) -> str:
        """The version label that the server puts on the tokens it makes now."""
        return str((await self.model_info()).get("weight_version", ""))

    async def loads(self) -> Load:
        answer = _mapping(await self._call("GET", "/v1/loads"), "/v1/loads")
        ranks = answer.get("loads")
        if not isinstance(ranks, list) or not ranks:
            raise EngineAnswerError(
                f"{self.base_url}/v1/loads holds no list of loads: {str(answer)[:_BODY_IN_MESSAGE]}"
            )
        try:
            return _load(ranks)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineAnswerError(
                f"{self.base_url}/v1/loads has another form than expected ({error!r}): {str(answer)[:_BODY_IN_MESSAGE]}"
            ) from error

    async def capabilities(self) -> Capabilities:
        """Asked once, best when the server has just started: it then describes its interface, which takes it a moment.

        Nothing is generated to find out: under load a probe would wait behind all other requests.
        """
        if self._capabilities is None:
            info = await self.server_info()
            version = str(info.get("version", ""))
            described = await self._call("GET", "/openapi.json")
            self._capabilities = Capabilities(
                version=version,
                spans=_release(version) >= _REPORTS_SPANS,
                extra_key=_describes_extra_key(described),
                flush_while_queued=_release(version) >= _FLUSHES_WHILE_QUEUED,
                radix_cache=not info.get("disable_radix_cache", False),
                update_sessions="/begin_weight_update" in _paths(described),
                ranks=int(info.get("tp_size", 1)),
                replicated=max(int(info.get(name) or 1) for name in ("dp_size", "pp_size")) > 1,
                own_draft=info.get("speculative_draft_model_path")
                not in (None, info.get("model_path"), info.get("tokenizer_path")),  # the first changes with an update
                longest_tokens=info.get("context_length") or info.get("max_req_input_len"),
            )
        return self._capabilities

    async def prompt_logprobs(self, token_ids: Sequence[int], timeout_s: float) -> list[float]:
        """Log-probability of each token but the first given those before it, [T - 1], computed anew (no cached prefix).

        `timeout_s`: it waits like any request for those that the engine has in hand.
        """
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = _mapping(await self._call("POST", "/generate", body, timeout_s), "/generate")
        try:
            found = answer["meta_info"]["input_token_logprobs"]
            return [math.nan if entry[0] is None else float(entry[0]) for entry in found[1:]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise EngineAnswerError(f"/generate answered without log-probabilities of its input: {error!r}") from error

    async def check_pause_mode(self, mode: PauseMode) -> None:
        """Raises EngineCapabilityError where updates with `mode` would let old KV serve new tokens."""
        can = await self.capabilities()
        if mode == "retract" and can.radix_cache and not can.flush_while_queued:
            raise EngineCapabilityError(
                f"sglang {can.version} cannot flush its prefix cache while requests are queued, so after an update in"
                " mode retract old KV would serve new tokens; set sglang.disable-radix-cache: true,"
                " or use sglang >= 0.5.23"
            )
        if mode == "in_place" and can.radix_cache and not can.extra_key:
            raise EngineCapabilityError(
                f"sglang {can.version} knows no extra_key, so in mode in_place new requests would match old prefixes;"
                " set sglang.disable-radix-cache: true, or use pause: retract"
            )

    async def pause(self, mode: PauseMode) -> None:
        """The mode is always sent: an empty body means abort, which kills what is in flight.

        Raises EngineCapabilityError, before anything happens, where an update in this mode would not be safe.
        """
        await self.check_pause_mode(mode)
        await self._call("POST", "/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def flush_cache(self) -> None:
        """Drops all KV. Raises EngineRefusedError when anything runs."""
        await self._call("POST", "/flush_cache")

    async def update_from_disk(self, folder: Path, label: str, mode: PauseMode) -> None:
        """Loads the safetensors of `folder` into the server and labels them. Call `pause` first, in the same `mode`."""
        can = await self.capabilities()
        body = {
            "model_path": str(folder),
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": mode == "retract" and can.flush_while_queued,
            "torch_empty_cache": False,
        }
        await self._succeed("/update_weights_from_disk", body)

    async def update_from_tensors(self, payloads: Sequence[str], label: str, mode: PauseMode) -> None:
        """Loads the flattened bucket behind one payload for each tensor-parallel rank, and labels it. Call `pause` first.

        A release that knows sessions gets one round it; a draft model of its own is left as it is. A payload that does not fit
        would end the server: what it holds was compared with the model's tensors before.
        """
        can = await self.capabilities()
        models = {"selector": "target" if can.own_draft else "all"} if can.update_sessions else {}
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": "flattened_bucket",
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": mode == "retract" and can.flush_while_queued,
            "torch_empty_cache": False,
            **models,
        }
        if can.update_sessions:
            await self._succeed("/begin_weight_update", models)
        await self._succeed("/update_weights_from_tensor", body)
        if can.update_sessions:
            await self._succeed("/end_weight_update", {})

    async def update_from_handles(self, handles: Mapping[str, str], label: str, mode: PauseMode) -> None:
        """Has the server's checkpoint-engine receiver fetch the weights at these ZeroMQ addresses (by the name of each of its
        devices), and labels them. Call `pause` first."""
        can = await self.capabilities()
        body = {
            "zmq_handles": dict(handles),
            "weight_version": label,
            "flush_cache": mode == "retract" and can.flush_while_queued,
            "torch_empty_cache": False,
        }
        await self._succeed("/update_weights_from_ipc", body)

    async def _succeed(self, path: str, body: dict[str, Any]) -> None:
        answer = _mapping(await self._call("POST", path, body, self._update_timeout_s), path)
        if not answer.get("success"):
            raise EngineAnswerError(f"{self.base_url}{path} did not succeed: {str(answer)[:_BODY_IN_MESSAGE]}")

    async def set_version_label(self, label: str) -> None:
        """Renames the weights that are live. SGLang's default would abort all requests; this never does."""
        await self._call("POST", "/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def abort(self, rid: str) -> None:
        """Ends one request; its partial output goes to whoever waits for it. An empty `rid` is refused."""
        if not rid:
            raise ValueError("abort needs the id of one request: found an empty one")
        await self._call("POST", "/abort_request", {"rid": rid, "abort_all": False})

    async def abort_all(self) -> None:
        """Ends every request; what each has made goes to whoever waits for it. For a server that is about to end."""
        await self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    async def _call(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        limit_s = timeout_s or self._timeout_s
        where = f"{method} {self.base_url}{path}"
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.request(
                method, self.base_url + path, json=body, headers=self._headers, timeout=timeout
            ) as response:
                content = await response.read()
        except TimeoutError as error:
            raise EngineTimeoutError(f"{where} had no answer within {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachableError(
                f"{where} failed: {error or type(error).__name__}; is the engine up?"
            ) from error
        if response.status >= 400:
            text = content.decode(errors="replace")[:_BODY_IN_MESSAGE]
            raise EngineRefusedError(f"{where} answered {response.status}: {text}", response.status, text)
        return _json(content)


def _load(ranks: list[dict[str, Any]]) -> Load:
    def total(name: str) -> int | None:
        """None where a release does not report it, or reports nothing."""
        return sum(int(rank.get(name, 0)) for rank in ranks) or None

    return Load(
        running=sum(int(rank["num_running_reqs"]) for rank in ranks),
        waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
        used_tokens=sum(int(rank["num_used_tokens"]) for rank in ranks),
        token_usage=max(float(rank["token_usage"]) for rank in ranks),
        generated_tokens_per_s=sum(float(rank["gen_throughput"]) for rank in ranks),
        capacity_tokens=total("max_total_num_tokens"),
        running_at_most=total("max_running_requests"),
        waiting_tokens=total("num_waiting_uncached_tokens"),
        prefilled_tokens=total("total_prefill_uncached_tokens"),
        retracted=sum(int((rank.get("queues") or {}).get("retracted", 0)) for rank in ranks),
    )


def _json(content: bytes) -> Any:
    """Some calls answer with a line of text, or nothing: then the text."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content.decode(errors="replace")


def _mapping(answer: Any, path: str) -> dict[str, Any]:
    if isinstance(answer, dict):
        return answer
    raise EngineAnswerError(f"{path} answered {str(answer)[:_BODY_IN_MESSAGE]!r}; expected a JSON object")


def _release(version: str) -> tuple[int, ...]:
    """`0.5.15.post1` to (0, 5, 15); () when it is no number."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _paths(described: Any) -> Mapping[str, Any]:
    paths = described.get("paths") if isinstance(described, dict) else None
    return paths if isinstance(paths, dict) else {}


def _describes_extra_key(described: Any) -> bool:
    try:
        return "extra_key" in described["components"]["schemas"]["GenerateReqInput"]["properties"]
    except (KeyError, TypeError):
        return False
