"""A classifier's score: what it is asked, which number counts, and what is no score."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from reward_recipe import load

from physarum.actors.context import RunFolder
from physarum.actors.reward.scorer import models_of, scorer_of
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.rewards.answer import Answer
from physarum.agents.rewards.backend import backend_for
from physarum.agents.rewards.classifier import conversation, score_classifier, score_of
from physarum.agents.rewards.errors import BackendRefusedError, BackendReplyError, BackendUnavailableError, RewardError
from physarum.configs.errors import ConfigError
from physarum.configs.reward_types import ClassifierReward

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ANSWER = Answer(text="0579", prompt="123+456=", task="t", token_ids=[5, 6, 7])


@asynccontextmanager
async def classifier(
    *replies: Any, status: int = 200, **options: Any
) -> AsyncIterator[tuple[ClassifierReward, list[Any]]]:
    """A service that gives each reply in turn, the last one for ever; and what it was asked."""
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(replies[min(len(asked), len(replies)) - 1], status=status)

    app = web.Application()
    app.router.add_post("/classify", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    given = {"render": "tokens", **options}
    made = ClassifierReward.model_validate({"url": f"http://127.0.0.1:{runner.addresses[0][1]}", **given})
    try:
        yield made, asked
    finally:
        await backend_for(made).close()
        await runner.cleanup()


async def test_the_samples_tokens_are_sent_as_they_are_and_the_number_is_scaled() -> None:
    async with classifier({"embedding": [-1.5], "meta_info": {}}, scale=2.0, shift=1.0) as (options, asked):
        assert await score_classifier(ANSWER, options) == -2.0
        assert await score_classifier(ANSWER, options) == -2.0
    assert asked == [{"input_ids": [5, 6, 7]}], "an equal question is remembered"


async def test_the_conversation_is_rendered_by_the_classifiers_own_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    answer = Answer(text="0579", prompt="123+456=", metadata={"chat": {"system_prompt": "1"}}, task="t")
    assert [one["role"] for one in conversation(answer)] == ["system", "user", "assistant"]
    async with classifier({"embedding": [0.5]}, render="chat", model=str(tmp_path)) as (options, asked):
        assert await score_classifier(answer, options) == 0.5
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = conversation(answer)
    expected = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    assert asked == [{"input_ids": expected}]


@pytest.mark.parametrize(
    ("outputs", "options", "score"),
    [
        ([0.0, 2.0], {"output": 1}, 2.0),
        ([1.0, 1.0], {"activation": "softmax"}, 0.5),
        ([1000.0, -1000.0], {"activation": "softmax"}, 1.0),
        ([0.0], {"activation": "sigmoid"}, 0.5),
        ([-5000.0], {"activation": "sigmoid"}, 0.0),
        (3, {}, 3.0),
    ],
)
def test_the_output_that_counts(outputs: Any, options: dict[str, Any], score: float) -> None:
    given = ClassifierReward.model_validate({"url": "http://h:1", "render": "tokens", **options})
    assert math.isclose(score_of(given, {"embedding": outputs}), score)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"embedding": [0.1]}, "has 1 outputs; expected more than output = 1"),
        ({"embedding": ["high"]}, "expected finite numbers"),
        ({"embedding": [True, True]}, "expected finite numbers"),
        ({"text": "no"}, "expected finite numbers"),
        ([], "expected finite numbers"),
    ],
)
async def test_a_reply_without_the_number_is_no_score_and_is_not_remembered(reply: Any, message: str) -> None:
    async with classifier(reply, {"embedding": [0.0, 1.0]}, output=1) as (options, asked):
        with pytest.raises(BackendReplyError, match=message):
            await score_classifier(ANSWER, options)
        assert await score_classifier(ANSWER, options) == 1.0
    assert len(asked) == 2


async def test_what_the_engine_refuses_is_asked_once_and_what_fails_is_asked_again() -> None:
    async with classifier({}, status=400) as (options, asked):
        with pytest.raises(BackendRefusedError):
            await score_classifier(ANSWER, options)
    assert len(asked) == 1
    async with classifier({}, status=503, attempts=3, deadline_s=5) as (options, asked):
        with pytest.raises(BackendUnavailableError, match="3 of 3 requests"):
            await score_classifier(ANSWER, options)
    assert len(asked) == 3


async def test_a_text_that_is_too_long_is_refused_by_name_and_never_cut() -> None:
    async with classifier({"embedding": [1.0]}, max_tokens=2) as (options, asked):
        with pytest.raises(
            RewardError, match=r"task t: prompt and answer are 3 tokens; expected at most max_tokens = 2"
        ):
            await score_classifier(ANSWER, options)
    assert asked == []


async def test_a_prompt_that_is_no_conversation_is_refused_by_name(tmp_path: Path) -> None:
    async with classifier({"embedding": [1.0]}, render="chat", model=str(tmp_path)) as (options, _):
        with pytest.raises(RewardError, match="task t has a prompt of dict"):
            await score_classifier(Answer(text="a", prompt={}, task="t"), options)
        with pytest.raises(
            RewardError, match=r"cannot be rendered for the classifier: .*tokenizer.json does not exist"
        ):
            await score_classifier(ANSWER, options)


SERVED = ("engines.rm.model=./rm", "engines.rm.sglang.is-embedding=true")


def test_hook_processes_get_the_folder_of_the_engines_model(tmp_path: Path) -> None:
    config = load(tmp_path, "type: classifier\nargs: {engine: rm}", *SERVED)
    scorer = scorer_of(config.reward, RunFolder(tmp_path), tmp_path / "engines.json", models_of(config))
    assert scorer is not None
    assert scorer.args["args"] == {
        "engine": "rm", "engines_file": str(tmp_path / "engines.json"), "model": str(config.engines["rm"].model),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "args", "message"),
    [
        (["engines.rm.model=./rm"], "{engine: rm}", "set `engines.rm.sglang.is-embedding: true`"),
        ([], "{engine: rm}", "add `engines.rm.model`"),
        ([], "{url: 'http://h:1'}", r"name the classifier's folder in `reward.args.model`"),
        (SERVED, "{engine: rm, outptu: 1}", "did you mean `reward.args.output`"),
        (SERVED, "{engine: rm, url: 'http://h:1'}", "exactly one of `url`, `engine`"),
    ],
)
def test_what_cannot_be_right_is_refused(tmp_path: Path, words: list[str], args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, f"type: classifier\nargs: {args}", *words)
