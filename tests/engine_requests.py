"""Requests to the session's engine, and what transformers says about their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp
from engine_fixture import LiveEngine

TOKENS = 160
PROMPT = 64


def prompt(number: int) -> list[int]:
    """Prompts that share no first token, so that no two share a prefix."""
    return [10 + number, *(10 + (number * 7 + position * 3) % 400 for position in range(PROMPT - 1))]


async def generate(engine: LiveEngine, number: int, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    body = {
        "input_ids": prompt(number),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        **more,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    assert isinstance(answer, dict)
    return answer


class Streams:
    """Requests that are known to have made some tokens each, because their first ones were streamed here."""

    def __init__(self, engine: LiveEngine, numbers: Sequence[int], **more: Any) -> None:
        self._engine = engine
        self._begun = [asyncio.Event() for _ in numbers]
        pairs = zip(numbers, self._begun, strict=True)
        self.tasks = [asyncio.create_task(self._follow(number, begun, more)) for number, begun in pairs]

    async def begun(self) -> None:
        await asyncio.gather(*(event.wait() for event in self._begun))

    async def answers(self) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*self.tasks))

    async def _follow(self, number: int, begun: asyncio.Event, more: dict[str, Any]) -> dict[str, Any]:
        body = {
            "input_ids": prompt(number),
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
            **more,
        }
        ids, logprobs, last = [], [], {}
        async with (
            aiohttp.ClientSession(read_bufsize=2**22) as session,
            session.post(f"{self._engine.url}/generate", json=body) as response,
        ):
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = json.loads(line.removeprefix(b"data: "))
                    ids += last["output_ids"]
                    logprobs += last["meta_info"]["output_token_logprobs"]
                    begun.set()
        meta = {**last["meta_info"], "output_token_logprobs": logprobs}
        return {**last, "output_ids": ids, "meta_info": meta}


def spans(answer: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in answer["meta_info"]["weight_versions"]]


def worst(engine: LiveEngine, number: int, answer: dict[str, Any], start: int, end: int, seed: int) -> float:
    """Largest difference to transformers' log-probabilities of tokens [start, end) under the weights of `seed`."""
    expected = engine.logprobs(seed, prompt(number) + answer["output_ids"])[PROMPT - 1 :]
    given = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(given[position] - expected[position]) for position in range(start, end))
