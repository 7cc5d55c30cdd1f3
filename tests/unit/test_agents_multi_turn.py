"""Turns are token-exact, budgets are never exceeded, and text work grows linearly with the turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from physarum.agents.errors import EnvironmentTimeoutError
from physarum.agents.multi_turn import run_turns
from physarum.agents.protocols import FinishReason, Generation, TokenIds
from physarum.bus.records import Sample, Task
from physarum.bus.version import Span

TASK = Task(id="s/0/0/0", run="t", source="s", ordinal=0, group="s/0/0", group_size=1, member=0)


class CodePoints:
    """One token per character; counts the characters it worked on."""

    def __init__(self) -> None:
        self.worked = 0

    def encode(self, text: str) -> list[int]:
        self.worked += len(text)
        return [ord(character) for character in text]

    def decode(self, token_ids: TokenIds) -> str:
        self.worked += len(token_ids)
        return "".join(chr(token) for token in token_ids)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        raise AssertionError("multi-turn episodes never render their history")


class Script:
    """A client that says the given turns, cut to the budget, and keeps what it was asked to continue."""

    def __init__(self, turns: Sequence[str], finish: FinishReason = "stop", limit: int | None = None) -> None:
        self.turns, self.finish = list(turns), finish
        self.tokenizer = CodePoints()
        self.sampling: dict[str, Any] = {} if limit is None else {"max_new_tokens": limit}
        self.asked: list[str] = []
        self.budgets: list[int | None] = []

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        self.asked.append("".join(chr(token) for token in token_ids))
        self.budgets.append(max_new_tokens)
        said = self.turns.pop(0)
        cut = max_new_tokens is not None and len(said) > max_new_tokens
        ids = [ord(character) for character in said[:max_new_tokens]]
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            spans=[Span("p@0.1", 0, len(ids))] if ids else [],
            finish_reason="length" if cut else self.finish,
            cached_tokens=0,
            prompt_tokens=len(token_ids),
            started_at=0.0,
            finished_at=1.0,
            rid="r",
        )


class Echo:
    """Answers with the given observations, then ends the episode."""

    def __init__(self, observations: Sequence[str]) -> None:
        self.observations, self.heard = list(observations), list[str]()

    @property
    def outputs(self) -> dict[str, Any]:
        return {"heard": self.heard}

    async def step(self, text: str) -> str | None:
        self.heard.append(text)
        return self.observations.pop(0) if self.observations else None


def text_of(sample: Sample) -> str:
    return "".join(chr(token) for token in sample.token_ids)


@pytest.mark.asyncio
async def test_two_turns_continue_exactly_what_was_generated() -> None:
    client, environment = Script(["ab", "cd"]), Echo(["[x]"])
    sample = await run_turns(TASK, client, [ord("?")], environment, max_turns=4, max_tokens=50)
    assert client.asked == ["?", "?ab[x]"]
    assert text_of(sample) == "?ab[x]cd"
    assert sample.loss_mask.tolist() == [True, True, False, False, False, True, True]
    assert (sample.status, sample.outputs) == ("completed", {"heard": ["ab", "cd"]})
    assert [event.kind for event in sample.events] == ["engine", "tool", "engine", "tool"]


@pytest.mark.asyncio
async def test_the_turn_budget_truncates_without_a_dangling_observation() -> None:
    sample = await run_turns(TASK, Script(["ab", "cd"]), [63], Echo(["[x]", "[y]"]), max_turns=2, max_tokens=50)
    assert (text_of(sample), sample.status) == ("?ab[x]cd", "truncated")


@pytest.mark.asyncio
async def test_the_token_budget_is_shared_by_policy_and_environment() -> None:
    client = Script(["ab", "cdefgh"], limit=6)
    sample = await run_turns(TASK, client, [63], Echo(["[x]"]), max_turns=9, max_tokens=9)
    assert client.budgets == [6, 4]
    assert (text_of(sample), sample.status) == ("?ab[x]cdef", "truncated")


@pytest.mark.asyncio
async def test_an_observation_that_leaves_no_room_is_not_appended() -> None:
    sample = await run_turns(TASK, Script(["ab"]), [63], Echo(["[xy]"]), max_turns=9, max_tokens=6)
    assert (text_of(sample), sample.status) == ("?ab", "truncated")


@pytest.mark.asyncio
async def test_an_aborted_turn_trains_nothing() -> None:
    sample = await run_turns(TASK, Script(["ab"], finish="abort"), [63], Echo([]), max_turns=2, max_tokens=9)
    assert (sample.status, sample.trainable, sample.trainable_tokens) == ("aborted", False, 0)


@pytest.mark.asyncio
async def test_text_work_is_linear_in_the_turns() -> None:
    work = {}
    for turns in (100, 200):
        client = Script(["abcd"] * turns)
        await run_turns(TASK, client, [63], Echo(["[x]"] * (turns - 1)), max_turns=turns, max_tokens=100_000)
        work[turns] = client.tokenizer.worked
    assert work == {100: 100 * 4 + 99 * 3, 200: 200 * 4 + 199 * 3}


class Stuck(Echo):
    async def step(self, text: str) -> str | None:
        await asyncio.Event().wait()
        return None


@pytest.mark.asyncio
async def test_an_environment_that_never_answers_is_named() -> None:
    with pytest.raises(EnvironmentTimeoutError, match=r"Stuck of task s/0/0/0 did not answer a step within 0.01 s"):
        await run_turns(TASK, Script(["ab"]), [63], Stuck([]), max_turns=2, max_tokens=9, step_timeout_s=0.01)


class Raises(Echo):
    async def step(self, text: str) -> str | None:
        raise TimeoutError("the tool's own")


@pytest.mark.asyncio
async def test_the_environments_own_timeout_is_not_taken_for_ours() -> None:
    with pytest.raises(TimeoutError, match="the tool's own"):
        await run_turns(TASK, Script(["ab"]), [63], Raises([]), max_turns=2, max_tokens=9)
