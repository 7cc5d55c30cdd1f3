"""A judge model compares the members of a group over HTTP; each place lands on the execution that earned it."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.errors import BackendReplyError
from physarum.agents.rewards.tournaments.judged import score
from physarum.bus.records import Execution, Sample, Task
from physarum.configs.reward_types import TournamentReward

ASKED = re.compile(r"Response A\]\nworth (\d+).*Response B\]\nworth (\d+)", re.DOTALL)


@asynccontextmanager
async def judge(decides: Callable[[int, int], str], **options: Any) -> AsyncIterator[tuple[dict[str, Any], list[Any]]]:
    """Arguments for the hook, and the pairs that the judge was shown."""
    shown: list[tuple[int, int]] = []

    async def handle(request: web.Request) -> web.Response:
        found = ASKED.search((await request.json())["messages"][-1]["content"])
        assert found is not None
        pair = int(found[1]), int(found[2])
        shown.append(pair)
        return web.json_response({"choices": [{"message": {"content": f"So: {decides(*pair)}"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    args = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}", **options}
    try:
        yield args, shown
    finally:
        await backend_for(TournamentReward(**args)).close()
        await runner.cleanup()


def group(*worth: int) -> list[Execution]:
    made = []
    for member, value in enumerate(worth):
        task = Task(
            id=f"g/{member}", run="r", source="s", ordinal=member, group="g", group_size=len(worth), member=member,
            prompt="Be worth much.",
        )  # fmt: skip
        sample = Sample(
            token_ids=np.arange(2, dtype=np.int32), prompt_len=1, loss_mask=np.zeros(1, np.bool_),
            logprobs=np.zeros(1, np.float32), origin="demonstration", outputs={"response": f"worth {value}"},
        )  # fmt: skip
        made.append(
            Execution(id=f"e{member}", task=task, samples=[sample], worker="w", started_at=0.0, finished_at=1.0)
        )
    return made


def better(first: int, second: int) -> str:
    return "[[A]]" if first > second else "[[B]]" if second > first else "[[C]]"


@pytest.mark.parametrize("format", ["round_robin", "swiss", "double_elimination", "single_elimination", "anchor"])
async def test_places_are_the_members_own(format: str, tmp_path: Path) -> None:
    worth = random.Random(3).sample(range(8), 8)
    async with judge(better, format=format) as (args, _):
        scores = await score(group(*worth), args=args, folder=str(tmp_path))
    assert np.corrcoef(scores, worth)[0, 1] >= 0.9


async def test_a_judge_that_prefers_the_first_prefers_nobody(tmp_path: Path) -> None:
    async with judge(lambda first, second: "[[A]]", format="round_robin") as (args, shown):
        assert await score(group(1, 2, 3), args=args, folder=str(tmp_path)) == [0.5] * 3
    assert len(shown) == 6


async def test_equal_answers_tie_unasked(tmp_path: Path) -> None:
    async with judge(better, format="round_robin", both_orders=False) as (args, shown):
        assert await score(group(4, 4, 9), args=args, folder=str(tmp_path)) == [0.25, 0.25, 1.0]
    assert shown and (4, 4) not in shown


async def test_a_judge_without_any_verdict_has_not_judged_and_is_asked_again(tmp_path: Path) -> None:
    async with judge(lambda first, second: "hm", format="round_robin") as (args, shown):
        for times in (1, 2):
            with pytest.raises(BackendReplyError, match=r"no verdict on any of 6 questions.*So: hm"):
                await score(group(1, 2, 3), args=args, folder=str(tmp_path))
            assert len(shown) == 6 * times


async def test_verdicts_that_are_missing_are_logged_and_move_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with judge(lambda first, second: "hm" if 9 in (first, second) else "[[C]]", format="round_robin") as (
        args,
        _,
    ):
        assert await score(group(1, 2, 9), args=args, folder=str(tmp_path)) == [0.5] * 3
    assert "group g: 4 of 6 questions had no verdict; the last: the judge said 'So: hm'" in caplog.text


async def test_equal_answers_alone_need_no_verdict(tmp_path: Path) -> None:
    assert await score(group(7, 7), args={"url": "http://127.0.0.1:9"}, folder=str(tmp_path)) == [0.5] * 2


async def test_a_try_that_is_repeated_asks_nothing_again(tmp_path: Path) -> None:
    async with judge(better, format="swiss") as (args, shown):
        first = await score(group(3, 1, 2, 0), args=args, folder=str(tmp_path))
        asked = len(shown)
        assert await score(group(3, 1, 2, 0), args=args, folder=str(tmp_path)) == first
        assert len(shown) == asked


async def test_a_member_that_is_alone_has_nobody_to_be_compared_with(tmp_path: Path) -> None:
    assert await score(group(7), args={"url": "http://127.0.0.1:9"}, folder=str(tmp_path)) == [0.5]
