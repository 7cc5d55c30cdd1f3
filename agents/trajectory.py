"""The one place where a trajectory grows. Invariant: ids, mask, log-probabilities and spans always have one length.

Only two things are ever appended: what engines generated, and what the environment said (mask 0, log-probability NaN).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from physarum.agents.choices import Experts, cut, extended
from physarum.agents.errors import TrajectoryError
from physarum.agents.protocols import Generation, TokenIds
from physarum.bus.engine_choices import KeptTokens
from physarum.bus.records import Event, Sample, Status
from physarum.bus.version import Span, append_span

_TRAINABLE: frozenset[Status] = frozenset({"completed", "truncated"})


class Trajectory:
    """Builds one Sample. Appending is atomic: a refused append leaves the trajectory as it was."""

    def __init__(self, prompt_ids: TokenIds) -> None:
        """`prompt_ids` [P], P >= 1: the tokens before the policy's (or the environment's) first one."""
        if len(prompt_ids) == 0:
            raise TrajectoryError("the prompt has no token; expected at least one: give the chat template's opening")
        self._ids: list[int] = list(map(int, prompt_ids))
        self._prompt_len = len(self._ids)
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._spans: list[Span] = []
        self._flaws: list[str] = []
        self._conservative = False
        self._events: list[Event] = []
        self._experts: Experts | None = None
        self._kept: list[tuple[int, KeptTokens | None]] = []

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and response so far, int32 [P + R]: exactly what the next generation continues."""
        return np.asarray(self._ids, dtype=np.int32)

    @property
    def prompt_len(self) -> int:
        return self._prompt_len

    @property
    def response_len(self) -> int:
        return len(self._ids) - self._prompt_len

    def append_generated(self, generation: Generation) -> None:
        """Add an engine's tokens; those with a finite log-probability carry gradient.

        Raises TrajectoryError when log-probabilities or spans do not match the tokens one to one.
        """
        _check_generation(generation)
        if generation.spans:
            self._adopt_leading_environment(generation.spans[0].version)
        self._ids.extend(generation.token_ids.tolist())
        self._logprobs.append(generation.logprobs.astype(np.float32))
        for span in generation.spans:
            append_span(self._spans, span.version, span.end - span.start)
        self._flaws.extend(generation.flaws)
        self._conservative |= generation.conservative
        if generation.routed_experts is not None:
            self._experts = extended(self._experts, generation.routed_from, generation.routed_experts)
        self._kept.append((len(generation.token_ids), generation.kept_tokens))
        self.record_event("engine", generation.started_at, generation.finished_at)

    def append_environment(self, token_ids: TokenIds) -> None:
        """Add tokens that no policy made. They belong to the version that was live: the last span's.

        Before the first generation no version is known yet: they join the first one that generates.
        """
        self._ids.extend(map(int, token_ids))
        self._logprobs.append(np.full(len(token_ids), np.nan, dtype=np.float32))
        self._kept.append((len(token_ids), None))
        if self._spans:
            append_span(self._spans, self._spans[-1].version, len(token_ids))

    def record_event(self, kind: str, start: float, end: float) -> None:
        """Something took from `start` to `end` (Unix seconds)."""
        self._events.append(Event(kind, start, end))

    def sample(
        self,
        *,
        status: Status = "completed",
        reward: float | None = None,
        outputs: dict[str, Any] | None = None,
        trainable: bool | None = None,
    ) -> Sample:
        """The record as it stands; appending may go on afterwards.

        `trainable` defaults to: completed or truncated. Flaws of the generations are named in outputs["flaws"].
        """
        generated = bool(self._spans)
        logprobs = np.concatenate([np.zeros(0, np.float32), *(self._logprobs if generated else ())])
        flaws = {"flaws": list(self._flaws)} if self._flaws else {}
        return Sample(
            token_ids=self.token_ids,
            prompt_len=self._prompt_len if generated else len(self._ids),  # nothing generated: all of it is prompt
            loss_mask=np.isfinite(logprobs),
            logprobs=logprobs,
            spans=list(self._spans),
            conservative=self._conservative,
            status=status,
            trainable=status in _TRAINABLE if trainable is None else trainable,
            reward=reward,
            outputs={**(outputs or {}), **flaws},
            events=list(self._events),
            routed_experts=cut(self._experts, len(self._ids) - 1) if generated and self._experts is not None else None,
            kept_tokens=self._kept_tokens() if generated else None,
        )

    def _kept_tokens(self) -> KeptTokens | None:
        if all(kept is None for _, kept in self._kept):
            return None
        return KeptTokens.joined([kept or KeptTokens.nothing(count) for count, kept in self._kept])

    def _adopt_leading_environment(self, version: str) -> None:
        if not self._spans:
            append_span(self._spans, version, self.response_len)


def _check_generation(generation: Generation) -> None:
    count = len(generation.token_ids)
    if generation.logprobs.shape != (count,):
        raise TrajectoryError(
            f"generation {generation.rid} has {count} tokens, but log-probabilities of shape"
            f" {generation.logprobs.shape}; expected ({count},), NaN where there is none"
        )
    ends = [0, *(span.end for span in generation.spans)]
    contiguous = all(
        span.start == end and span.end > span.start for span, end in zip(generation.spans, ends, strict=False)
    )
    if not contiguous or ends[-1] != count:
        raise TrajectoryError(
            f"generation {generation.rid} has spans {[(s.start, s.end) for s in generation.spans]};"
            f" expected them to cover its {count} tokens in order, without gaps"
        )
