"""The client that episodes use against SGLang: token ids in; token ids, log-probabilities and spans out.

Invariant: what `generate` returns was made by engines token for token, whatever happened underneath (retries, other
engines, updates, aborts). Nothing is re-tokenised, nothing is cut short in silence.

    router.pick -> POST /generate -> parse_reply -> Held -> Generation
      ^   |              |                            |
      |   +- no engine   +- 4xx: EngineRefusedError   +- abort: continue behind the tokens held ---+
      |   |              +- 5xx, connection, timeout: back off; behind what a stream had brought --+
      |   +-> EngineUnavailableError(partial) <- attempts or deadline used up                      |
      +--------------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from physarum.agents.asking import ask_pair, post, post_streamed
from physarum.agents.budget import TokenBudget, nothing_more
from physarum.agents.clock import EpisodeClock
from physarum.agents.engine_wire import Reply, build_request, parse_reply
from physarum.agents.environments.lease import Leased, NoEnvironmentError
from physarum.agents.environments.pool import EnvironmentPool
from physarum.agents.errors import (
    BrokenOffError,
    EngineError,
    EngineFailedError,
    EngineRefusedError,
    EngineReplyError,
    EngineUnavailableError,
    NoEngineError,
    OffPinError,
)
from physarum.agents.fleet.choice import Wanted
from physarum.agents.held import Held, check_sampling
from physarum.agents.journal import Journal
from physarum.agents.meter import BusyMeter
from physarum.agents.pairs import MovedError, PrefillError, room_at
from physarum.agents.policies import Policies, PolicyParts
from physarum.agents.protocols import Generation, TokenIds, Tokenizer
from physarum.agents.replay import Kind, Replay
from physarum.agents.retries import DEFAULT_RETRY, Retries, RetryPolicy
from physarum.agents.routing import EngineRef, Router
from physarum.agents.seeds import Seeds
from physarum.agents.session import EngineChoices, LiveSampling, Session
from physarum.agents.streaming import Received
from physarum.bus.records import Task
from physarum.bus.version import Version
from physarum.configs.suggest import nearest

logger = logging.getLogger(__name__)

_SESSION: Final = "X-SMG-Routing-Key"
"""By which an sglang-router of policy `manual` keeps a session on its engine."""
_FAILED: Final = (
    EngineFailedError,
    BrokenOffError,
    OffPinError,
    PrefillError,
    MovedError,
    aiohttp.ClientError,
    TimeoutError,
)
"""What another engine, or another try, may do better."""
_ROUTER_GRACE_S: Final = 0.2
"""Beyond its deadline, for a router to say by itself why there is no engine."""


# (engine, reported label, submitted at, answered at: Unix seconds) -> the oldest label the tokens may hold.
OldestVersion = Callable[[EngineRef, str, float, float], str]


def _arrived(error: Exception) -> bool:
    """Whether the request that failed so reached an engine; of a pair, the half that failed."""
    cause = error.cause if isinstance(error, PrefillError) else None
    return not isinstance(cause or error, aiohttp.ClientConnectorError)


def version_at_submission(ref: EngineRef, label: str, submitted_at: float, answered_at: float) -> str:
    """Default OldestVersion, for engines that do not report `weight_versions` (SGLang 0.5.15): what the engine announced
    before the request was sent. An engine announces a version after it serves it, so no token is older; the label in
    the reply is the one at its *end*, and would make older tokens look young."""
    return ref.version


class EngineClient:
    """One per process; `for_task` gives an episode its own view (sampling defaults, request ids) on the same parts."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        router: Router,
        tokenizer: Tokenizer,
        *,
        sampling: Mapping[str, Any] | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
        resume_aborted: bool = True,
        cache_per_version: bool = False,
        oldest_version: OldestVersion = version_at_submission,
        meter: BusyMeter | None = None,
        episode_tokens: int | None = None,
        choices: EngineChoices | None = None,
        stream_tokens: int | None = None,
        policies: Policies[EngineClient] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`episode_tokens`: what the requests of one task may generate in all; `cache_per_version` sends extra_key = the
        engine's version, so that no prefix of old weights is reused; `resume_aborted` False returns an aborted generation as
        it is (finish_reason "abort"); with `stream_tokens` answers come in chunks of so many, which outlive their engine.
        `policies`: the further ones that an episode may ask for by name.
        `on_sent`, to be set on a task's view, is called when a request goes out, after it waited for an engine."""
        self._session, self._router, self._tokenizer = session, router, tokenizer
        self._sampling: dict[str, Any] = dict(sampling or {})
        self._retry, self._resume, self._cache_per_version = retry, resume_aborted, cache_per_version
        self._oldest_version = oldest_version
        self._rng = rng or random.Random()
        self._rid_prefix = ""
        self._pin: int | None = None
        self._minimum: int | None = None
        self._affinity = Session()
        self._choices = choices or EngineChoices()
        self._policies = policies or Policies()
        self._evaluates = False
        self._named: Mapping[str, Any] = {}
        self._stream_tokens = stream_tokens
        self.live = LiveSampling()
        self.environments: Mapping[str, EnvironmentPool] = {}
        self._row: Mapping[str, Any] = {}
        self._seeds: Seeds | None = None
        self._given_seed: int | None = None
        self._episode_tokens = episode_tokens
        self._budget = TokenBudget(None)
        self.clock = EpisodeClock()
        self.on_sent: Callable[[], None] = lambda: None
        self.journal: Journal | None = None
        self.meter = meter or BusyMeter()
        self.replay = Replay()
        self.flaws: Counter[str] = Counter()
        self.retried: Counter[str] = Counter()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {**self._sampling, **self.live.values, **self._row}

    def through(self, router: Router) -> EngineClient:
        """The same client on other engines; meter and counters stay shared."""
        view = copy.copy(self)
        view._router = router
        return view

    def for_task(self, task: Task) -> EngineClient:
        """A view whose defaults are ours with the task's sampling laid over; meter and counters stay shared.

        A task that is pinned is served by its weights alone, token for token. What interrupted runs of the task generated
        is handed out again; `journal.begun()` is what this run has so far.
        """
        view = copy.copy(self)
        view._sampling = {**self._sampling, **task.sampling}
        view._row = task.metadata.get("sampling") or {}
        view._evaluates = task.task_class == "eval"
        if view._evaluates:  # it has sampling of its own, and nothing of it is trained
            view.live, view._choices = LiveSampling(), EngineChoices(seed=self._choices.seed)
        view._given_seed = view._sampling.pop("sampling_seed", None)
        seed = self._choices.seed if view._given_seed is None else view._given_seed
        view._row = {name: value for name, value in view._row.items() if name != "sampling_seed"}
        view._seeds = None if seed is None else Seeds(seed, task.id)
        view._rid_prefix = f"{task.id}:"
        view._pin = task.pin
        view._affinity = Session(resumed=bool(task.begun))
        view._budget, view.clock = TokenBudget(self._episode_tokens), EpisodeClock()
        view.journal = Journal(task.begun)
        view._policies = self._policies.for_task(view)
        return view

    def of(self, policy: str) -> EngineClient:
        """See protocols.Client.of."""
        return self._policies.view(policy, self, EngineClient._seated)

    def _seated(self, name: str, parts: PolicyParts) -> EngineClient:
        """A view of this task for another policy."""
        view = copy.copy(self)
        view._router, view._tokenizer, view._named = parts.router, parts.tokenizer, {"policy": name}
        view._choices = EngineChoices(seed=parts.choices.seed) if self._evaluates else parts.choices
        view._pin = view._minimum = None
        view._affinity = Session(resumed=self._affinity.resumed)
        given = self._given_seed
        if parts.sampling is not None:
            view._sampling, view._row, view.live = dict(parts.sampling), {}, LiveSampling()
            given = view._sampling.pop("sampling_seed", None)
        seed = parts.choices.seed if given is None else given
        view._seeds = None if seed is None else Seeds(seed, f"{self._rid_prefix}{name}")
        return view

    @contextlib.asynccontextmanager
    async def environment(self, name: str) -> AsyncIterator[Leased]:
        """See protocols.Client.environment."""
        pool = self.environments.get(name)
        if pool is None:
            near = nearest(name, self.environments)
            known = (
                f"did you mean {near!r}" if near is not None else f"there are: {', '.join(self.environments) or 'none'}"
            )
            raise NoEnvironmentError(f"the run has no environments.{name}; {known}")
        async with contextlib.AsyncExitStack() as stack:
            with self.clock.held():
                leased = await stack.enter_async_context(pool.lease())
            yield leased

    def at_least(self, number: int) -> EngineClient:
        """A view that is served by weights of this number or newer ones."""
        view = copy.copy(self)
        view._minimum = number
        return view

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        """Continue `token_ids` [P]. See protocols.Client.generate for the errors.

        An abort by the engine is continued from the tokens held, with what remains of the budget, possibly on another
        engine; then the generation's spans name every version that took part.
        """
        given = {**(sampling or {}), **({} if max_new_tokens is None else {"max_new_tokens": max_new_tokens})}
        prompt, params = np.asarray(token_ids, dtype=np.int32), check_sampling({**self.sampling, **given})
        if self._budget.is_spent:
            return nothing_more(prompt)
        if self._seeds is not None and "sampling_seed" not in params:
            given["sampling_seed"] = params["sampling_seed"] = self._seeds.next(prompt)
        named = check_sampling({**self._sampling, **self._row, **given})
        held = self._open(prompt, self._budget.within(params), {**self._budget.within(named), **self._named})
        made = self._comparable(await self._finish(held), params)
        self._affinity.reported(prompt, made)
        self._budget.spend(len(made.token_ids))
        return made

    def _comparable(self, made: Generation, sampling: Mapping[str, Any]) -> Generation:
        """Without log-probabilities where they are of another temperature than the trainer's."""
        trained = self._choices.temperature
        if trained is None or sampling.get("temperature", 1.0) == trained:
            return made
        self.flaws["temperature"] += 1
        nothing = np.full_like(made.logprobs, np.nan)
        return msgspec.structs.replace(made, logprobs=nothing, flaws=(*made.flaws, "temperature"))

    async def _finish(self, held: Held) -> Generation:
        """Requests until `held` is finished, or nobody finishes it."""
        retries = Retries(self._retry, self._rng)
        while not held.finished:
            try:
                reply = await self._send(held, retries)
            except _FAILED as error:
                if _arrived(error):
                    held.interrupted = "lost"
                await self._retry_later(held, retries, error)
                continue
            if not held.finished and not self._resume:
                break
            if not held.finished:
                await self._resume_later(held, retries, reply)
        return held.generation()

    def _open(self, prompt: npt.NDArray[np.int32], sampling: dict[str, Any], named: dict[str, Any]) -> Held:
        """`named`: what the request is known by, which no change of the run's sampling meanwhile makes another one."""
        routed_from = self._affinity.routed_from(prompt) if self._choices.capture is not None else 0
        if self.journal is None:
            return Held(prompt, sampling, routed_from)
        return self.journal.open(prompt, sampling, routed_from, named)

    async def _send(self, held: Held, retries: Retries) -> Reply:
        """One request on one engine; its reply is added to `held`."""
        prompt = held.next_prompt()
        ref = await self._pick(held, prompt, retries)
        rid = f"{self._rid_prefix}{uuid.uuid4().hex}"
        chunk = None if ref.prefill is not None or not held.continuable else self._stream_tokens
        received = None if chunk is None else Received(ref.url, ref.version)
        try:
            request = self._request(ref, held, prompt, rid, chunk)
            self.on_sent()
            reply = await self._ask(ref, request, rid, len(prompt), retries, held.next_routed(), received)
            self._check_pin(reply, ref)
            self._router.served(ref, len(reply.token_ids))
            self._affinity.engine = ref.home
        except (*_FAILED, EngineReplyError, EngineRefusedError, asyncio.CancelledError) as error:
            if isinstance(error, Exception):
                self._router.failed(ref, error)
            if self._keep(received, held, len(prompt), rid, ref):
                retries.progressed()
            raise
        finally:
            self._router.release(ref)
        self._count_flaw(reply, ref, rid)
        self._count_replay(reply, len(prompt), held.continued_by(ref.instance))
        held.add(reply, rid, ref.instance)
        return reply

    def _request(self, ref: EngineRef, held: Held, prompt: npt.NDArray[np.int32], rid: str, chunk: int | None) -> bytes:
        """`chunk`: the tokens of one, where the answer is streamed."""
        key = ref.version if self._cache_per_version and not ref.through else None
        capture, sampling = self._choices.capture, held.next_sampling()
        asks = {} if capture is None else capture.asks(sampling, held.next_routed())
        room = {} if ref.prefill is None else room_at(ref.prefill)
        return build_request(prompt, sampling, rid, key, {**asks, **room}, chunk)

    def _keep(self, received: Received | None, held: Held, length: int, rid: str, ref: EngineRef) -> bool:
        """What came of an answer that broke off stays in `held`, for the next request or the next worker; True for anything."""
        partial = (
            None if received is None else received.partial(length, self._choices.capture, exact=self._pin is not None)
        )
        if partial is None:
            return False
        self._count_replay(partial, length, held.continued_by(ref.instance))
        held.add(partial, rid, ref.instance)
        return True

    async def _pick(self, held: Held, prompt: npt.NDArray[np.int32], retries: Retries) -> EngineRef:
        """Waiting for an engine that comes is not charged to the request; only absence has its deadline."""
        wanted = Wanted(
            tokens=prompt,
            max_new_tokens=held.next_sampling()["max_new_tokens"],
            number=self._pin,
            minimum=self._minimum,
            prefers=self._affinity.engine,
            resumes=self._affinity.resumed or held.count > 0 or retries.failures > 0,
        )
        since, limit_s = time.monotonic(), max(self._retry.room_s, retries.remaining_s) + _ROUTER_GRACE_S
        try:
            with self.clock.held():
                async with asyncio.timeout(limit_s):
                    ref = await self._router.pick(retries.remaining_s, wanted)
        except (NoEngineError, TimeoutError) as error:
            why = str(error) or f"none had room within {limit_s:g} s"
            raise self._unavailable(held, retries, f"no engine was free: {why}") from error
        retries.excuse(time.monotonic() - since)
        return ref

    async def _ask(
        self,
        ref: EngineRef,
        request: bytes,
        rid: str,
        length: int,
        retries: Retries,
        routed_from: int,
        received: Received | None,
    ) -> Reply:
        """Of one engine, or of a pair. `length`: of the prompt; `routed_from`: the first input whose experts are wanted;
        `received`: where the chunks of a streamed answer are kept."""
        submitted_at, capture, timeout_s = time.time(), self._choices.capture, retries.request_timeout_s

        def oldest(label: str) -> str:
            return self._oldest_version(ref, label, submitted_at, time.time())

        headers = {_SESSION: self._rid_prefix or rid} if ref.through else {}
        with self.meter.busy(), self.clock.working():
            if ref.prefill is not None:
                return await ask_pair(
                    self._session, ref, request, length, timeout_s, lambda: self._router.prefilled(ref)
                )
            if received is not None:
                await post_streamed(
                    self._session, ref.url, request, timeout_s, retries.answer_limit_s, received, headers
                )
                return received.reply(length, oldest, capture, routed_from)
            body = await post(self._session, ref.url, request, timeout_s, headers)
        return parse_reply(body, ref.url, length, oldest, capture, routed_from)

    async def _resume_later(self, held: Held, retries: Retries, reply: Reply) -> None:
        """After an abort: at once when it brought tokens to continue from, else like a failure."""
        self.retried["abort"] += 1
        if len(reply.token_ids) and held.continuable:
            retries.progressed()
            return
        if not held.continuable:
            held.restart()
        await self._back_off(held, retries, EngineError("the engine aborted the request and left nothing to continue"))

    async def _retry_later(self, held: Held, retries: Retries, error: Exception) -> None:
        self.retried[type(error).__name__] += 1
        logger.info(
            "request on an engine failed, attempt %d of %d: %s", retries.failures + 1, self._retry.attempts, error
        )
        await self._back_off(held, retries, error)

    async def _back_off(self, held: Held, retries: Retries, error: Exception) -> None:
        retries.failed(error)
        if retries.exhausted:
            raise self._unavailable(held, retries, "giving up") from error
        with self.clock.held():
            await retries.back_off()

    def _unavailable(self, held: Held, retries: Retries, why: str) -> EngineUnavailableError:
        last = f"{type(retries.last).__name__}: {retries.last}" if retries.last else "none"
        return EngineUnavailableError(
            f"no engine finished the request ({why}); {retries.failures} of {self._retry.attempts} attempts failed in a"
            f" row within a deadline of {self._retry.deadline_s} s, last failure: {last}; {held.count} tokens held."
            " See that engines are live (actorctl ps), or raise the request's deadline",
            partial=held.generation() if held.count else None,
        )

    def _check_pin(self, reply: Reply, ref: EngineRef) -> None:
        """Raises OffPinError for tokens of other weights; the engine is left out until it announces what it serves now."""
        if self._pin is None:
            return
        off = [span.version for span in reply.spans if Version.parse(span.version).number != self._pin]
        if off:
            raise OffPinError(
                f"engine {ref.instance} made tokens with {off[0]}; the task is pinned to number {self._pin}"
            )

    def _count_replay(self, reply: Reply, prompt: int, interrupted: Kind | None) -> None:
        if interrupted is not None and (len(reply.token_ids) or reply.finish_reason != "abort"):
            self.replay.continued(interrupted, prompt, reply.cached_tokens)
        self.replay.answered(prompt, reply.spans, reply.retractions)

    def _count_flaw(self, reply: Reply, ref: EngineRef, rid: str) -> None:
        if reply.flaw is not None:
            self.flaws[reply.flaw] += 1
            logger.warning("reply %s of engine %s is not fully trainable: %s", rid, ref.instance, reply.flaw)
