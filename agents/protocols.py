"""What a user's code meets: the hooks it may write (Generate, Reward, TaskSource) and the Client it is handed.

Invariant: everything here is tokens in, tokens out. Text appears only where a person or a tool reads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from physarum.agents.environments.lease import Leased
from physarum.bus.engine_choices import KeptTokens
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.version import Span

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "abort"]
Score: TypeAlias = float | dict[str, float | list[float]]
"""A number, or parts by name; the part `turns` is a list with one score per turn of the policy (a step reward)."""
RewardValue: TypeAlias = Score | list[Score]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What engines made of one prompt: N new tokens.

    token_ids int32 [N]; logprobs float32 [N], natural log under the sampling temperature, NaN where an engine gave none
    that can be trusted; spans cover [0, N) of *these* tokens in order. `flaws` names why log-probabilities are missing
    (empty for a sound generation). `conservative`: spans name the oldest version that may have made a token. Times are
    Unix seconds. `rid` is the id of the last request sent. Where the run replays the engine's choices: `routed_experts`, rows
    [routed_from, P + N - 1) of the prompt of P tokens and these, and `kept_tokens`, N rows (bus/engine_choices.py).
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: list[Span]
    finish_reason: FinishReason
    cached_tokens: int
    prompt_tokens: int
    started_at: float
    finished_at: float
    rid: str
    flaws: tuple[str, ...] = ()
    conservative: bool = False
    routed_experts: npt.NDArray[Any] | None = None
    routed_from: int = 0
    kept_tokens: KeptTokens | None = None


class Tokenizer(Protocol):
    """Text to ids and back, without adding or hiding special tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: TokenIds) -> str: ...

    def is_special(self, token_id: int) -> bool:
        """Whether the tokenizer marks it as special (end of a turn, padding), so that no text stands for it."""
        ...

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """The chat template applied to `messages`, as token ids. `options` as transformers' apply_chat_template takes them:
        `tools`, `chat_template` (a Jinja text), and what the template itself knows (`enable_thinking`)."""
        ...


class Client(Protocol):
    """A policy as an episode sees it: the run's own, or what `of` gives. Retries, engine choice, updates and interruptions
    happen underneath."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer, loaded at first use and shared by all episodes of a process."""
        ...

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The task's sampling parameters (SGLang's names), used where a call gives no others."""
        ...

    def environment(self, name: str) -> AbstractAsyncContextManager[Leased]:
        """`async with client.environment("browser") as leased`: an instance of the class `environments.<name>` for the block.
        The episode's clock stands still while it waits for a place. Raises EnvironmentLeaseError."""
        ...

    def of(self, policy: str) -> Client:
        """The same episode's client of another policy of the run (`policies.<name>`, or `model.name`). Asked twice, it is the
        same one. A sample holds tokens of one policy only. Raises NoPolicyError."""
        ...

    def at_least(self, number: int) -> Client:
        """The same client, served by weights of this number or newer ones; a request waits until an engine has them."""
        ...

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        """Continue `token_ids`. `sampling` is laid over the task's defaults, `max_new_tokens` over both.

        Raises EngineRefusedError (never retried), EngineUnavailableError (deadline or attempts used up),
        EngineReplyError (not an engine's reply) and SamplingError.
        """
        ...


class Generate(Protocol):
    """Hook `rollout.generate`: runs one task to its end. `args` come from the configuration."""

    async def __call__(self, task: Task, client: Client, **args: Any) -> list[Sample]:
        """At least one sample; several for sub-agents or compaction (the loss counts the execution once)."""
        ...


class Reward(Protocol):
    """Hook `reward.hook`: a number, named parts (summed by `reward.weights`), or a list of those, one entry per sample.

    A step reward returns {"turns": [r_0, r_1, ...]}, one score per turn of the policy; with `trainer.algorithm.advantage:
    turns` each turn then learns from its own discounted return.
    """

    def __call__(self, execution: Execution, **args: Any) -> RewardValue | Awaitable[RewardValue]: ...


class GroupReward(Protocol):
    """Hook `reward.group.hook`: one reward for each execution of a group, in their order."""

    def __call__(
        self, executions: list[Execution], **args: Any
    ) -> list[RewardValue] | Awaitable[list[RewardValue]]: ...


class TaskSource(Protocol):
    """Hook `source.hook`, called as hook(seed, **args): an indexed stream of task rows.

    `row` is a pure function of its arguments, so that a source restarted at any position issues the same tasks.
    """

    def __len__(self) -> int:
        """Rows per epoch."""
        ...

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Keys `prompt`, `label`, `metadata` (the last two optional)."""
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one group came out, as the trainer's plan recorded it: the row's place, what was issued under which state, the
    rewards of its executions (those dropped by a filter or for their age included), and the number of the weights."""

    epoch: int
    index: int
    state: Any
    rewards: list[float]
    number: int


class Curriculum(Protocol):
    """Hook `source.curriculum.hook`, called as hook(seed, **args): which tasks come next, learnt from how others came out.

    Every method is a pure function of its arguments; `state` is whatever JSON can hold, and small: it is stored with the
    source's position, so a source that starts anew goes on exactly. A state holds for the tasks issued after it was made.
    The methods are called in a thread, one at a time: one that takes long holds up its source's tasks and nothing else.
    """

    def initial(self) -> Any:
        """The state before anything came out."""
        ...

    def observe(self, state: Any, outcomes: Sequence[Outcome]) -> Any:
        """The state after the groups of one plan. The same object, or an equal one, where nothing changes."""
        ...

    def row(self, state: Any, epoch: int, index: int, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row to issue in the place of `row`; None skips it."""
        ...

    def group_size(self, state: Any) -> int | None:
        """Executions of each prompt; None takes `source.group_size`."""
        ...

    def sampling(self, state: Any) -> Mapping[str, Any]:
        """Sampling parameters laid over the configured ones (`max_new_tokens`: the window)."""
        ...


class Environment(Protocol):
    """The other side of a multi-turn episode."""

    @property
    def outputs(self) -> dict[str, Any]:
        """What the episode is judged by; becomes Sample.outputs."""
        ...

    async def step(self, text: str) -> str | None:
        """Answer the policy's turn (its exact text, special tokens included).

        Returns the text to append, chat markup included, up to where the policy speaks again; None ends the episode.
        """
        ...
