"""The tokens one `generate` holds while engines come and go. Invariant: prompt + held is what the next request sends.

An aborted reply leaves its tokens here; the next request continues behind them with what remains of the budget.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from physarum.agents.choices import Experts, cut, extended
from physarum.agents.engine_wire import Reply
from physarum.agents.errors import SamplingError
from physarum.agents.protocols import FinishReason, Generation
from physarum.agents.replay import Kind
from physarum.bus.engine_choices import KeptTokens
from physarum.bus.version import Span, append_span
from physarum.configs.sampling import SamplingNameError, check_names

DEFAULT_MAX_NEW_TOKENS: Final = 256

# Parameters whose effect depends on where the *output* began: an engine that is handed held tokens as prompt would
# sample from another distribution (penalties), leave the grammar, or miss a stop string that straddles the border.
_BOUND_TO_OUTPUT_START: Final = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_regex",
)
_NEUTRAL: Final[dict[str, float]] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def check_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters with max_new_tokens filled in. Raises SamplingError for an unknown name, and for what a client cannot
    honour."""
    try:
        check_names(sampling)
    except SamplingNameError as error:
        raise SamplingError(str(error)) from None
    params = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS, **sampling}
    budget = params["max_new_tokens"]
    if not isinstance(budget, int) or budget < 1:
        raise SamplingError(f"max_new_tokens is {budget!r}; expected an integer of at least 1")
    return params


class Held:
    """One generation in the making. Not shared between tasks."""

    def __init__(self, prompt: npt.NDArray[np.int32], sampling: dict[str, Any], routed_from: int = 0) -> None:
        """`prompt` int32 [P]; `sampling` as check_sampling has it; `routed_from`: the first input whose experts are wanted."""
        self._prompt = prompt
        self._sampling = sampling
        self._replies: list[Reply] = []
        self._started_at = time.time()
        self._rid = ""
        self._adopted_flaws: tuple[str, ...] = ()
        self.engine = ""
        """The engine that answered last."""
        self.interrupted: Kind | None = None
        """What ended the last request before its time; None where the next one is the first."""
        self._routed_from = routed_from

    @property
    def sampling(self) -> dict[str, Any]:
        """As it was asked for, whatever is held."""
        return self._sampling

    @property
    def count(self) -> int:
        """Tokens held."""
        return sum(len(reply.token_ids) for reply in self._replies)

    @property
    def finish_reason(self) -> FinishReason:
        """Of the generation as it stands; an abort after the last token of the budget is a length stop."""
        last: FinishReason = self._replies[-1].finish_reason if self._replies else "abort"
        return "length" if last == "abort" and self.count >= self._sampling["max_new_tokens"] else last

    @property
    def finished(self) -> bool:
        return self.finish_reason != "abort"

    @property
    def continuable(self) -> bool:
        """May an engine continue behind held tokens and sample as if it had made them itself?"""
        return all(self._sampling.get(key) in (None, "", [], _NEUTRAL.get(key)) for key in _BOUND_TO_OUTPUT_START)

    def next_prompt(self) -> npt.NDArray[np.int32]:
        """int32 [P + held]."""
        return np.concatenate([self._prompt, *(reply.token_ids for reply in self._replies)])

    def next_sampling(self) -> dict[str, Any]:
        """The sampling parameters with lengths reduced by what is held."""
        rest = {"max_new_tokens": self._sampling["max_new_tokens"] - self.count}
        if "min_new_tokens" in self._sampling:
            rest["min_new_tokens"] = max(0, self._sampling["min_new_tokens"] - self.count)
        return {**self._sampling, **rest}

    def next_routed(self) -> int:
        """The first input whose experts nobody reported yet."""
        experts = self._experts()
        return self._routed_from + (0 if experts is None else len(experts))

    def add(self, reply: Reply, rid: str, engine: str = "") -> None:
        self._replies.append(reply)
        self._rid = rid
        if len(reply.token_ids) or reply.finish_reason != "abort":  # else it never ran there
            self.engine, self.interrupted = engine, "aborted" if reply.finish_reason == "abort" else None

    def continued_by(self, engine: str) -> Kind | None:
        """What the request was interrupted by that `engine` now goes on with."""
        return "moved" if self.interrupted == "aborted" and engine != self.engine else self.interrupted

    def adopt(self, generation: Generation) -> None:
        """Holds what an earlier run made of the same request; an unfinished one only where an engine may go on with it."""
        if generation.finish_reason == "abort" and not self.continuable:
            return
        self._started_at, self._rid, self._adopted_flaws = generation.started_at, generation.rid, generation.flaws
        self.interrupted = "handed_over"
        self._routed_from = generation.routed_from
        self._replies.append(
            Reply(
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                spans=generation.spans,
                finish_reason=generation.finish_reason,
                cached_tokens=generation.cached_tokens,
                flaw=None,
                conservative=generation.conservative,
                experts=generation.routed_experts,
                experts_start=generation.routed_from,
                kept=generation.kept_tokens,
            )
        )

    def restart(self) -> None:
        """Forget the tokens held."""
        self._replies.clear()
        self._adopted_flaws = ()

    def generation(self) -> Generation:
        """Everything held, as one generation with merged spans."""
        spans: list[Span] = []
        for reply in self._replies:
            for span in reply.spans:
                append_span(spans, span.version, span.end - span.start)
        return Generation(
            token_ids=np.concatenate([np.zeros(0, np.int32), *(reply.token_ids for reply in self._replies)]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *(reply.logprobs for reply in self._replies)]),
            spans=spans,
            finish_reason=self.finish_reason,
            cached_tokens=self._replies[0].cached_tokens if self._replies else 0,
            prompt_tokens=len(self._prompt),
            started_at=self._started_at,
            finished_at=time.time(),
            rid=self._rid,
            conservative=any(reply.conservative for reply in self._replies),
            flaws=(*self._adopted_flaws, *(reply.flaw for reply in self._replies if reply.flaw is not None)),
            routed_experts=self._whole_experts(),
            routed_from=self._routed_from,
            kept_tokens=self._kept(),
        )

    def _experts(self) -> Experts | None:
        """Rows from `routed_from` on, as far as they were reported."""
        found: Experts | None = None
        for reply in self._replies:
            if reply.experts is not None:
                found = extended(found, reply.experts_start - self._routed_from, reply.experts)
        return found

    def _whole_experts(self) -> Experts | None:
        experts = self._experts()
        return None if experts is None else cut(experts, len(self._prompt) + self.count - 1 - self._routed_from)

    def _kept(self) -> KeptTokens | None:
        if all(reply.kept is None for reply in self._replies):
            return None
        return KeptTokens.joined([reply.kept or KeptTokens.nothing(len(reply.token_ids)) for reply in self._replies])
