"""Demonstrations become samples without engine: trained segments masked in, no log-probability, no span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from physarum.agents.demonstration import generate
from physarum.agents.errors import DemonstrationError
from physarum.agents.protocols import Generation, TokenIds
from physarum.bus.codec import decode, encode
from physarum.bus.records import Sample, Task


class NoEngine:
    """A client whose tokenizer works (one token per character) and whose engine must not be asked."""

    sampling: Mapping[str, Any] = {}

    @property
    def tokenizer(self) -> NoEngine:
        return self

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: TokenIds) -> str:
        raise AssertionError("nothing to decode")

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        raise AssertionError("nothing to render")

    async def generate(
        self, token_ids: TokenIds, sampling: Mapping[str, Any] | None = None, *, max_new_tokens: int | None = None
    ) -> Generation:
        raise AssertionError("a demonstration asks no engine")


def task(prompt: Any = None, **metadata: Any) -> Task:
    return Task(
        id="d/0/1/0",
        run="t",
        source="d",
        ordinal=0,
        group="d/0/1",
        group_size=1,
        member=0,
        prompt=prompt,
        metadata=metadata,
    )


SEGMENTS = [
    {"text": "ab", "train": False},
    {"ids": [7], "train": True},
    {"text": "c", "train": False},
    {"text": "d", "train": True},
]


@pytest.mark.parametrize("given", [task(SEGMENTS), task(segments=SEGMENTS), task(rows=[SEGMENTS])])
@pytest.mark.asyncio
async def test_segments_by_hand(given: Task) -> None:
    (sample,) = await generate(given, NoEngine())
    assert sample.token_ids.tolist() == [97, 98, 7, 99, 100]
    assert (sample.prompt_len, sample.loss_mask.tolist()) == (2, [True, False, True])
    assert np.isnan(sample.logprobs).all()
    assert (sample.spans, sample.origin, sample.trainable_tokens) == ([], "demonstration", 2)
    assert decode(encode(sample), Sample).loss_mask.tolist() == [True, False, True]


@pytest.mark.asyncio
async def test_one_task_may_hold_many_demonstrations() -> None:
    samples = await generate(task(rows=[SEGMENTS] * 64), NoEngine())
    assert len(samples) == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (task(), "holds no demonstration"),
        (task(rows=[]), "holds no demonstration"),
        (task("text"), "holds no demonstration"),
        (task([{"text": "ab", "train": False}]), "2 tokens, 0 of them trained"),
        (task([{"text": "ab", "train": True}]), "at least one untrained prompt token"),
        (task([{"words": "ab"}]), r"keys \['words'\]"),
        (task([{"text": "a", "ids": [1]}]), r"keys \['ids', 'text'\]"),
        (task(rows=[SEGMENTS, [{"text": "a", "train": True}]]), "d/0/1/0 demonstration 1"),
    ],
)
@pytest.mark.asyncio
async def test_a_malformed_demonstration_is_named(given: Task, message: str) -> None:
    with pytest.raises(DemonstrationError, match=message):
        await generate(given, NoEngine())
