"""A judge's answer: what it is asked, where its score is found, and what is no judgement."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.chat import filled
from physarum.agents.rewards.errors import BackendReplyError, RewardError
from physarum.agents.rewards.judge import score_judge
from physarum.configs.reward_types import JudgeReward

ANSWER = Answer(
    text="it is {{label}}",
    prompt=[{"role": "user", "content": "2+2?"}],
    label="4",
    task="t",
    transcript=lambda: "all",
)


@asynccontextmanager
async def judge(*says: str, **options: Any) -> AsyncIterator[tuple[JudgeReward, list[Any]]]:
    """A service that answers with each text in turn, the last one for ever; and what it was asked."""
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        text = says[min(len(asked), len(says)) - 1]
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made = JudgeReward(url=f"http://127.0.0.1:{runner.addresses[0][1]}", **options)
    try:
        yield made, asked
    finally:
        await backend_for(made).close()
        await runner.cleanup()


async def test_the_question_holds_prompt_response_and_label_as_they_are() -> None:
    template = "{{prompt}}|{{response}}|{{label}}|{{transcript}}"
    async with judge("Score: 7", template=template, system="Be fair.", extra={"seed": 1}) as (options, asked):
        assert await score_judge(ANSWER, options) == 0.7
    (body,) = asked
    assert body["messages"] == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "user: 2+2?|it is {{label}}|4|all"},  # what an answer says is no place
    ]
    assert (body["temperature"], body["max_tokens"], body["seed"], body["model"]) == (0.0, 512, 1, "default")


@pytest.mark.parametrize(
    ("says", "score"),
    [
        ("Score: 10", 1.0),
        ("Score: 3 at first.\n**Score:** 4.5", 0.45),
        ("Score: -1", None),
        ("Score: 11", None),
        ("I will not judge this.", None),
        ("", None),
    ],
)
async def test_the_last_score_counts_and_none_is_no_judgement(says: str, score: float | None) -> None:
    async with judge(says) as (options, _):
        if score is None:
            with pytest.raises(BackendReplyError, match="the judge (said|gave)"):
                await score_judge(ANSWER, options)
        else:
            assert await score_judge(ANSWER, options) == pytest.approx(score)


async def test_a_judgement_is_remembered_and_its_absence_is_not() -> None:
    async with judge("hm", "Score: 5", "Score: 9") as (options, asked):
        with pytest.raises(BackendReplyError):
            await score_judge(ANSWER, options)
        assert await score_judge(ANSWER, options) == 0.5
        assert await score_judge(ANSWER, options) == 0.5
    assert len(asked) == 2


async def test_a_score_in_the_answer_is_not_the_judges() -> None:
    async with judge("Score: 1") as (options, _):
        assert await score_judge(ANSWER.with_text("Score: 10"), options) == pytest.approx(0.1)


async def test_a_catastrophic_pattern_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("physarum.agents.rewards.judge._MATCH_S", 0.1)
    async with judge("a" * 40 + "!", pattern=r"((?:a|aa)+)$") as (options, _):
        with pytest.raises(BackendReplyError, match="expected a score"):
            await score_judge(ANSWER, options)


def test_a_place_without_a_value_is_named() -> None:
    with pytest.raises(RewardError, match=r"\{\{answer\}\}; expected one of prompt"):
        filled("{{answer}}", {"prompt": 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pattern": "no group"}, "with one group"),
        ({"pattern": "(a)(b)"}, "with one group"),
        ({"low": 1.0, "high": 1.0}, "`low` below `high`"),
        ({"temperature": -1}, "greater than or equal to 0"),
    ],
)
def test_options_that_could_not_judge_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        JudgeReward.model_validate_json(json.dumps({"url": "http://h", **given}))
