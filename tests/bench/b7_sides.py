"""The two sides of B7 on one engine: a bare asyncio client, and a run of physarum that records. Each gives its completions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from physarum.actors.engine.control import EngineControl
from tests.bench.b7_hooks import Requests
from tests.bench.whole_runs import actorctl, recorded

RECIPE: Final = Path(__file__).with_name("b7.yaml")
_REQUEST_S: Final = 600.0
_LOOK_S: Final = 0.5
_WINDOW: Final = (0.2, 0.8)
"""The part of all tokens that a rate is taken over: neither the start nor the emptying of the slots counts."""

Settings = dict[str, Any]
"""Of a run, laid over those that all runs have."""
Completion = tuple[float, int]
"""When a request's tokens were there (Unix seconds), and how many."""


class Load(msgspec.Struct, frozen=True):
    """The same for both sides."""

    model: Path
    engine_url: str
    vocabulary: int
    concurrency: int
    count: int
    mean: int
    rollouts: int
    seed: int = 0


class SideFailedError(Exception):
    """A side did not do its work; the text says what it did."""


def tokens_per_s(completions: list[Completion]) -> float:
    """Tokens that came between the times at which 20 % and 80 % of them all were there."""
    (began, before), (ended, until) = _window(completions)
    return (until - before) / (ended - began)


def window(completions: list[Completion]) -> tuple[float, float]:
    """Begin and end of what the rate is taken over."""
    (began, _), (ended, _) = _window(completions)
    return began, ended


def _window(completions: list[Completion]) -> tuple[tuple[float, int], tuple[float, int]]:
    """(When, tokens until then) of its begin and its end."""
    ordered = sorted(completions)
    counted = list(itertools.accumulate(tokens for _, tokens in ordered))
    low, high = (next(i for i, total in enumerate(counted) if total >= share * counted[-1]) for share in _WINDOW)
    return (ordered[low][0], counted[low]), (ordered[high][0], counted[high])


@contextlib.asynccontextmanager
async def occupancy(url: str) -> AsyncIterator[list[tuple[float, int]]]:
    """(When, requests that the engine has), twice a second while the block runs."""
    found: list[tuple[float, int]] = []
    async with aiohttp.ClientSession() as session:
        control = EngineControl(url, session)

        async def look() -> None:
            while True:
                load = await control.loads()
                found.append((time.time(), load.running + load.waiting))
                await asyncio.sleep(_LOOK_S)

        looking = asyncio.create_task(look())
        try:
            yield found
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


def middle(there: list[tuple[float, int]], completions: list[Completion]) -> float:
    """Requests at the engine on average over the part that the rate is taken over."""
    began, ended = window(completions)
    within = [count for at, count in there if began <= at <= ended]
    return sum(within) / len(within) if within else float("nan")


async def bare(load: Load) -> list[Completion]:
    """The requests, `concurrency` at a time, with log-probabilities, from one asyncio client."""
    rows = Requests(load.seed, count=load.count, mean=load.mean, vocabulary=load.vocabulary)
    waiting = iter([rows.row(0, index) for index in range(load.count)])
    found: list[Completion] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(_slot(session, load.engine_url, waiting, found) for _ in range(load.concurrency)))
    return found


async def _slot(
    session: aiohttp.ClientSession, url: str, waiting: Iterator[dict[str, Any]], found: list[Completion]
) -> None:
    for row in waiting:
        wanted = row["metadata"]["tokens"]
        sampling = {"max_new_tokens": wanted, "ignore_eos": True, "temperature": 1.0}
        body = {"input_ids": row["prompt"], "sampling_params": sampling, "return_logprob": True}
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with session.post(f"{url}/generate", json=body, timeout=timeout) as answer:
            reply = await answer.json()
        got = len(reply["meta_info"]["output_token_logprobs"])
        if got != wanted:
            raise SideFailedError(f"the engine gave {got} tokens; expected {wanted}: see its log")
        found.append((time.time(), got))


async def physarum(load: Load, place: Path, name: str, further: Settings) -> list[Completion]:
    """A recording run of the same requests; its completions are read from SAMPLES when it has ended."""
    slots, rest = divmod(load.concurrency, load.rollouts)
    if rest:
        raise SideFailedError(f"{load.concurrency} slots over {load.rollouts} rollout actors; expected a multiple")
    settings = {
        "run.root": str(place),
        "run.name": name,
        "run.seed": load.seed,
        "model.path": str(load.model),
        "engines": {"policy": {"url": [load.engine_url]}},
        "source.args": {"count": load.count, "mean": load.mean, "vocabulary": load.vocabulary},
        "rollout.count": load.rollouts,
        "rollout.slots": slots,
        "rollout.request_timeout_s": _REQUEST_S,
        **further,
    }
    await actorctl("rollout-only", RECIPE, settings, place / f"{name}.log")
    samples, _ = await recorded(place / name)
    if len(samples) != load.count:
        raise SideFailedError(f"SAMPLES of {name} holds {len(samples)} samples; expected {load.count}")
    return [(one.events[-1].end, one.response_len) for one in samples]
