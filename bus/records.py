"""What travels: tasks and executions. A record that breaks its invariant refuses to exist (RecordError).

Token arrays: `token_ids` int32 [prompt_len + R]; `loss_mask` bool [R]; `logprobs` float32 [R], NaN where the engine
gave none. Environment tokens have mask False. A policy token with mask True always has a log-probability and a span.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
import numpy as np

from physarum.bus.engine_choices import KeptTokens, check_kept_tokens, check_routed_experts
from physarum.bus.errors import RecordError
from physarum.bus.version import Span, model_of

SCHEMA_VERSION: Final = 1

Status = Literal["completed", "truncated", "aborted", "failed"]
Origin = Literal["policy", "demonstration"]
TaskClass = Literal["partial", "p0", "p1", "eval"]
Array = np.ndarray[Any, Any]


class Begun(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One generation of an interrupted episode: N tokens int32, log-probabilities float32 [N], spans over [0, N).

    `request` is the digest of the prompt and the sampling parameters that they answer. finish_reason "abort": the
    generation itself was interrupted, and goes on behind these tokens. `routed_experts`, `kept_tokens`: as Generation has them.
    `sampling`: with which they were drawn, and are gone on behind; empty where that is not known.
    """

    request: str
    token_ids: Array
    logprobs: Array
    spans: list[Span]
    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int
    prompt_tokens: int
    started_at: float
    finished_at: float
    rid: str
    flaws: list[str] = []
    conservative: bool = False
    routed_experts: Array | None = None
    routed_from: int = 0
    kept_tokens: KeptTokens | None = None
    sampling: dict[str, Any] = {}

    def __post_init__(self) -> None:
        count, end = len(self.token_ids), self.spans[-1].end if self.spans else 0
        if self.logprobs.shape != (count,) or end != count:
            raise RecordError(
                f"generation {self.rid} has {count} tokens, log-probabilities of shape {self.logprobs.shape} and spans up to"
                f" {end}; expected {count} of each"
            )


class Task(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One unit of work: a prompt (or an environment seed) for one execution. id = source/epoch/index/member[+attempt].

    `ordinal` counts the source's tasks from 0 in the order of issue, so that sets of tasks are sets of intervals.
    `pin` (ordered mode): the number of the weights that must make every token. `begun`: what interrupted runs of this task
    generated, `interruptions` how many there were (task_class "partial").
    """

    id: str
    run: str
    source: str
    ordinal: int
    group: str
    group_size: int
    member: int
    attempt: int = 0
    task_class: TaskClass = "p1"
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    pin: int | None = None
    begun: list[Begun] = []
    interruptions: int = 0
    tenant: str = ""
    trace: str = ""
    issued_at: float = 0.0


class Event(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time inside an episode: kind ("engine", "tool", ...), start and end in Unix seconds."""

    kind: str
    start: float
    end: float


class Sample(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One trajectory. `origin` demonstration: no engine made the tokens, so log-probabilities and spans are absent.

    `conservative`: an engine did not report versions by token; spans name the oldest that may have made each.
    `turn_rewards`: one score per turn of the policy (a run of tokens with loss_mask True), where the reward gives them.
    `routed_experts`, `kept_tokens`: what the engine chose, where it was asked to report it (engine_choices.py).
    """

    token_ids: Array
    prompt_len: int
    loss_mask: Array
    logprobs: Array
    spans: list[Span] = []
    conservative: bool = False
    status: Status = "completed"
    origin: Origin = "policy"
    trainable: bool = True
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    turn_rewards: list[float] = []
    outputs: dict[str, Any] = {}
    events: list[Event] = []
    routed_experts: Array | None = None
    kept_tokens: KeptTokens | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        if self.origin == "policy":
            self._check_provenance()

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def policy(self) -> str:
        """Which policy made it, by the model in its spans; "" where they name none."""
        return model_of(self.spans)

    @property
    def turns(self) -> Array:
        """int32 [R]: which turn of the policy each token belongs to (a run of loss_mask True), -1 for the environment's."""
        begins = np.diff(self.loss_mask.astype(np.int8), prepend=0) == 1
        return np.where(self.loss_mask, np.cumsum(begins) - 1, -1).astype(np.int32)

    @property
    def trainable_tokens(self) -> int:
        return int(self.loss_mask.sum()) if self.trainable else 0

    def _check_lengths(self) -> None:
        if self.token_ids.ndim != 1:
            raise RecordError(
                f"token_ids have shape {self.token_ids.shape}; expected one dimension, prompt then response"
            )
        response = self.response_len
        if self.prompt_len < 1 or response < 0:
            raise RecordError(
                f"prompt_len is {self.prompt_len} of {len(self.token_ids)} tokens; expected at least one prompt token"
            )
        for name, array in (("loss_mask", self.loss_mask), ("logprobs", self.logprobs)):
            if array.shape != (response,):
                raise RecordError(
                    f"{name} has shape {array.shape}; expected ({response},), one entry per response token"
                )
        if self.loss_mask.dtype != np.bool_ or self.token_ids.dtype.kind not in "iu":
            raise RecordError(
                f"token_ids are {self.token_ids.dtype} and loss_mask {self.loss_mask.dtype}; expected integers and bool"
            )
        if self.logprobs.dtype.kind != "f":
            raise RecordError(f"logprobs are {self.logprobs.dtype}; expected float32, NaN where the engine gave none")
        if self.routed_experts is not None:
            check_routed_experts(self.routed_experts, len(self.token_ids))
        if self.kept_tokens is not None:
            check_kept_tokens(self.kept_tokens, response)

    def _check_provenance(self) -> None:
        bare = np.flatnonzero(self.loss_mask & ~np.isfinite(self.logprobs))
        if self.trainable and bare.size:
            raise RecordError(
                f"response token {int(bare[0])} is trainable but has no engine log-probability ({bare.size} such tokens);"
                " mask it, or mark the sample not trainable"
            )
        end = 0
        for span in self.spans:
            if span.start != end or span.end <= span.start:
                raise RecordError(
                    f"span {span} does not continue at token {end}: spans must cover the response in order"
                )
            end = span.end
        if end != self.response_len:
            raise RecordError(f"spans cover {end} tokens of a response of {self.response_len}")


class Execution(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything one run of one task made: one message in EPISODES, then (scored) one in SAMPLES."""

    id: str
    task: Task
    samples: list[Sample]
    worker: str
    started_at: float
    finished_at: float
    delivery: int = 1

    def __post_init__(self) -> None:
        if not self.samples:
            raise RecordError(
                f"execution {self.id} of task {self.task.id} holds no sample; a failed one is redelivered"
            )


class SampleHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header schema v1: what the planner needs of one sample without its body."""

    tokens: int
    response: int
    trainable: int
    reward: float | None
    status: Status
    spans: list[Span]
    span_trainable: list[int]

    @property
    def policy(self) -> str:
        """As Sample.policy."""
        return model_of(self.spans)


class ExecutionHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header schema v1 of one SAMPLES message: enough to plan a step from headers only.

    `compared`: the members of the group, this one among them, that were given their rewards together; none: it came after that;
    None: it was scored by itself.
    """

    execution: str
    task: str
    source: str
    ordinal: int
    group: str
    group_size: int
    member: int
    attempt: int
    tenant: str
    digest: str
    samples: list[SampleHeader]
    compared: tuple[int, ...] | None = None

    @property
    def reward(self) -> float | None:
        """The mean over its scored samples, so that fan-out counts an execution once; None where none is scored."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def trainable(self) -> int:
        return sum(sample.trainable for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)


class SampleScore(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the reward said of one sample. It travels in a header as long as it is small, so that the body of an execution
    need not be stored again."""

    reward: float | None = None
    parts: dict[str, float] = {}
    turns: list[float] = []


def scores_of(execution: Execution) -> list[SampleScore]:
    """One per sample."""
    return [SampleScore(reward=one.reward, parts=one.reward_parts, turns=one.turn_rewards) for one in execution.samples]


def with_scores(execution: Execution, scores: list[SampleScore]) -> Execution:
    """`execution` itself, scored. Raises RecordError when there are not as many scores as samples."""
    if len(scores) != len(execution.samples):
        raise RecordError(
            f"execution {execution.id} has {len(execution.samples)} samples and {len(scores)} scores; expected one for each"
        )
    for sample, score in zip(execution.samples, scores, strict=True):
        sample.reward, sample.reward_parts, sample.turn_rewards = score.reward, dict(score.parts), list(score.turns)
    return execution


def sample_header(sample: Sample) -> SampleHeader:
    """Lengths, spans and, per span, how many tokens carry gradient."""
    mask = sample.loss_mask if sample.trainable else np.zeros_like(sample.loss_mask)
    return SampleHeader(
        tokens=len(sample.token_ids),
        response=sample.response_len,
        trainable=sample.trainable_tokens,
        reward=sample.reward,
        status=sample.status,
        spans=list(sample.spans),
        span_trainable=[int(mask[span.start : span.end].sum()) for span in sample.spans],
    )


def execution_header(execution: Execution, digest: str, compared: tuple[int, ...] | None = None) -> ExecutionHeader:
    """The header that travels with `execution`; `digest` is of the message's body, `compared` as the header has it."""
    task = execution.task
    return ExecutionHeader(
        execution=execution.id,
        task=task.id,
        source=task.source,
        ordinal=task.ordinal,
        group=task.group,
        group_size=task.group_size,
        member=task.member,
        attempt=task.attempt,
        tenant=task.tenant,
        digest=digest,
        samples=[sample_header(sample) for sample in execution.samples],
        compared=compared,
    )
