"""Ready-made rewards through the real actor: its hook processes, the model's tokenizer, a service over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from actor_fixture import eventually, make_context, running
from aiohttp import web
from bus_fixture import DEADLINE_S
from engine_fixture import START_TIMEOUT_S, engine_python

from physarum.actors.context import Context
from physarum.actors.engine.frozen import check_frozen, check_reader
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.errors import UnrecoverableError
from physarum.actors.reward.actor import RewardActor
from physarum.actors.reward.judges import engines_file
from physarum.actors.wire import publish_execution, read_execution
from physarum.agents.calculator.model import build
from physarum.agents.calculator.tokenizer import save_tokenizer
from physarum.agents.rewards import sandbox
from physarum.agents.rewards.backend import opened
from physarum.agents.rewards.chat import PATH, completion
from physarum.agents.rewards.chat import said as chat_text
from physarum.agents.tokenizer import FolderTokenizer
from physarum.bus import log
from physarum.bus.codec import decode
from physarum.bus.connection import Bus
from physarum.bus.log import LogEntry, LogReader
from physarum.bus.names import StreamKey
from physarum.bus.presence import Heartbeat, announce
from physarum.bus.publisher import Publisher
from physarum.bus.records import Execution, Sample, Task
from physarum.bus.work import DeadLetter
from physarum.configs.reward_types import JudgeReward

FUNCTIONS = Path(__file__).parents[1] / "slime_functions.py"


def typed(folder: Path, bus: Bus, publisher: Publisher, *overrides: str) -> Context:
    context = make_context(folder, bus, publisher, "reward", *overrides)
    save_tokenizer(context.folder.start_model)
    return context


def said(context: Context, name: str, text: str, label: Any, **metadata: Any) -> Execution:
    ids = FolderTokenizer(context.folder.start_model).encode(text)
    task = Task(
        id=f"main/0/{name}/0", run=context.bus.run, source="main", ordinal=0, group=f"main/0/{name}", group_size=1,
        member=0, prompt="q", label=label, metadata=metadata,
    )  # fmt: skip
    sample = Sample(
        token_ids=np.array([1, *ids], np.int32), prompt_len=1, loss_mask=np.ones(len(ids), np.bool_),
        logprobs=np.zeros(len(ids), np.float32), origin="demonstration",
    )  # fmt: skip
    return Execution(id=name, task=task, samples=[sample], worker="test", started_at=0.0, finished_at=1.0)


async def entries(bus: Bus, key: StreamKey, count: int) -> list[LogEntry]:
    found: list[LogEntry] = []
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(LogReader(bus, key).batches(0.5)) as batches:
        async for batch in batches:
            found += batch
            if len(found) >= count:
                break
    return found


async def rewards(context: Context, count: int) -> dict[str, float | None]:
    found = [
        await read_execution(context, one.headers, one.data) for one in await entries(context.bus, "samples", count)
    ]
    return {one.id: one.samples[0].reward for one in found}


async def test_a_mixture_is_scored_by_the_types_of_its_rows(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    context = typed(tmp_path, bus, publisher, "reward.type=exact")
    for one in (
        said(context, "exact", "cat<|im_end|>", "cat"),
        said(context, "math", r"so \boxed{0.5}<|im_end|>", "1/2", rm_type="math"),
        said(context, "gpqa", "Answer: B<|im_end|>", "B", rm_type="gpqa"),
        said(context, "unknown", "x", "x", rm_type="exakt"),
    ):
        await publish_execution(context, "episodes", one)
    async with running(RewardActor(context)):
        assert await rewards(context, 3) == {"exact": 1.0, "math": 1.0, "gpqa": 1.0}
        (letter,) = [decode(entry.data, DeadLetter) for entry in await entries(bus, "dead", 1)]
    assert "task main/0/unknown/0 names metadata.rm_type 'exakt'" in letter.reason
    assert "did you mean `exact`" in letter.reason


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.slow), 4])
async def test_a_service_is_asked_from_hook_processes(
    tmp_path: Path, bus: Bus, publisher: Publisher, concurrency: int
) -> None:
    asked: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"score": len(asked[-1]["response"])})

    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    one_each = ("reward.type=remote_rm", f"reward.args.url={url}", f"reward.concurrency={concurrency}")
    context = typed(tmp_path, bus, publisher, *one_each)
    for number in range(1, 7):
        await publish_execution(context, "episodes", said(context, f"e{number}", "x" * number, "l"))
    try:
        async with running(RewardActor(context)):
            assert await rewards(context, 6) == {f"e{number}": float(number) for number in range(1, 7)}
    finally:
        await runner.cleanup()
    assert {tuple(sorted(one)) for one in asked} == {("label", "prompt", "response")}


@pytest.mark.slow
async def test_a_function_of_slimes_scores(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    options = ("reward.hook=null", f"reward.custom_rm={FUNCTIONS}:length", "reward.args.scale=0.5")
    context = typed(tmp_path, bus, publisher, *options)
    await publish_execution(context, "episodes", said(context, "a", "abcd", None))
    async with running(RewardActor(context)):
        assert await rewards(context, 1) == {"a": 2.0}


async def test_a_host_without_a_sandbox_ends_the_actor_by_name(
    tmp_path: Path, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with pytest.raises(UnrecoverableError, match=r"found no bwrap.*install bubblewrap"):
        async with asyncio.timeout(DEADLINE_S):
            await RewardActor(typed(tmp_path, bus, publisher, "reward.type=code")).run()


@asynccontextmanager
async def answering(path: str, handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """A server that answers posts to `path`; its address."""
    app = web.Application()
    app.router.add_post(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def judge(says: str) -> AsyncIterator[str]:
    """A server of chat completions; its address."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": says}}]})

    async with answering("/v1/chat/completions", handle) as url:
        yield url


async def present(bus: Bus, publisher: Publisher, url: str, sequence: int, state: str = "ready") -> None:
    beat = Heartbeat(
        role="engine", instance="judge-0", state=state, pid=1, host="h", started_at=1.0, sequence=sequence,
        facts={"group": "judge", "url": url},
    )  # fmt: skip
    await announce(bus, publisher, beat)


async def test_a_judge_of_this_run_is_waited_for_and_followed_to_its_new_address(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    options = ("reward.type=judge", "reward.args.engine=judge", "engines.judge.model=./judge", "reward.concurrency=2")
    context = typed(tmp_path, bus, publisher, *options)
    actor = RewardActor(context)
    await publish_execution(context, "episodes", said(context, "a", "first", None))
    async with running(actor), judge("Score: 3") as one, judge("Score: 7") as other:
        await present(bus, publisher, one, 1)
        assert await rewards(context, 1) == {"a": 0.3}
        await present(bus, publisher, other, 2)
        file = engines_file(context)
        await eventually(lambda: other.encode() in file.read_bytes())
        await publish_execution(context, "episodes", said(context, "b", "second", None))
        assert await rewards(context, 2) == {"a": 0.3, "b": 0.7}


ONE_TRY = (
    "reward.type=judge", "reward.args.engine=judge", "reward.args.attempts=1", "engines.judge.model=./judge",
    "reward.concurrency=2", "bus.max_deliver=1",
)  # fmt: skip


@asynccontextmanager
async def failing_judge(meanwhile: Callable[[], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that answers 503, after `meanwhile`; its address."""

    async def handle(request: web.Request) -> web.Response:
        await meanwhile()
        return web.Response(status=503)

    async with answering("/v1/chat/completions", handle) as url:
        yield url


async def test_what_a_judge_that_leaves_did_not_judge_waits_for_the_next_one_and_has_lost_no_try(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """It used up all tries of an execution: five of 26 s, where a judge may need ten minutes to start."""
    context = typed(tmp_path, bus, publisher, *ONE_TRY)
    file, left = engines_file(context), asyncio.Event()

    async def leave() -> None:
        await present(bus, publisher, "http://127.0.0.1:9", 2, "starting")
        await eventually(lambda: orjson.loads(file.read_bytes()) == {"judge": []})
        left.set()

    async with running(RewardActor(context)), failing_judge(leave) as one, judge("Score: 7") as other:
        await present(bus, publisher, one, 1)
        await publish_execution(context, "episodes", said(context, "a", "first", None))
        async with asyncio.timeout(DEADLINE_S):
            await left.wait()
        await publish_execution(context, "episodes", said(context, "b", "second", None))
        await present(bus, publisher, other, 3)
        assert await rewards(context, 2) == {"a": 0.7, "b": 0.7}


async def test_what_asks_no_judge_is_scored_while_the_judge_is_away(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = typed(tmp_path, bus, publisher, *ONE_TRY)
    file, actor = engines_file(context), RewardActor(context)
    async with running(actor), judge("Score: 3") as one, judge("Score: 7") as other:
        await present(bus, publisher, one, 1)
        await eventually(lambda: actor.state == "ready")
        await present(bus, publisher, one, 2, "starting")
        await eventually(lambda: orjson.loads(file.read_bytes()) == {"judge": []})
        await publish_execution(context, "episodes", said(context, "judged", "text", None))
        await publish_execution(context, "episodes", said(context, "plain", "cat<|im_end|>", "cat", rm_type="exact"))
        assert await rewards(context, 1) == {"plain": 1.0}
        await present(bus, publisher, other, 3)
        assert await rewards(context, 2) == {"plain": 1.0, "judged": 0.7}


async def test_an_actor_that_drains_while_no_judge_is_ready_gives_back(
    tmp_path: Path, bus: Bus, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    context = typed(tmp_path, bus, publisher, *ONE_TRY, "bus.max_deliver=3")  # to drain is a delivery, as for everybody
    gone = asyncio.Event()

    async def leave() -> None:
        await present(bus, publisher, "http://127.0.0.1:9", 2, "starting")
        await eventually(lambda: "no engine of judge is ready" in caplog.text)
        gone.set()

    async with running(RewardActor(context)), failing_judge(leave) as one:
        await present(bus, publisher, one, 1)
        await publish_execution(context, "episodes", said(context, "a", "first", None))
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
    assert (await log.state(bus, "episodes")).messages == 1
    assert (await log.state(bus, "dead")).messages == 0


async def test_a_judge_that_is_there_and_fails_costs_a_try(tmp_path: Path, bus: Bus, publisher: Publisher) -> None:
    async def stay() -> None:
        pass

    context = typed(tmp_path, bus, publisher, *ONE_TRY)
    async with running(RewardActor(context)), failing_judge(stay) as one:
        await present(bus, publisher, one, 1)
        await publish_execution(context, "episodes", said(context, "a", "first", None))
        (letter,) = [decode(entry.data, DeadLetter) for entry in await entries(bus, "dead", 1)]
    assert "engine group judge gave no score in 1 of 1 requests" in letter.reason


@asynccontextmanager
async def reward_model(score: float) -> AsyncIterator[str]:
    """A server of /classify; its address."""

    async def handle(request: web.Request) -> web.Response:
        assert (await request.json())["input_ids"][0] == 1, "the sample as it is, prompt first"
        return web.json_response({"embedding": [score], "meta_info": {}})

    async with answering("/classify", handle) as url:
        yield url


CLASSIFIER = (
    "reward.type=classifier", "reward.args.engine=judge", "engines.judge.model=./judge",
    "engines.judge.sglang.is-embedding=true", "reward.concurrency=8",
)  # fmt: skip


async def test_a_classifier_of_this_run_scores_through_the_actor(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    context = typed(tmp_path, bus, publisher, *CLASSIFIER, "reward.args.render=tokens", "reward.args.scale=2")
    for one in range(6):
        await publish_execution(context, "episodes", said(context, str(one), str(one), None))
    async with running(RewardActor(context)), reward_model(-0.25) as url:
        await present(bus, publisher, url, 1)
        assert await rewards(context, 6) == {str(one): -0.5 for one in range(6)}


async def test_a_classifier_read_with_another_tokenizer_than_its_engines_have_ends_by_name(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    """Every score would be of other tokens than the text's."""
    context = typed(tmp_path, bus, publisher, *CLASSIFIER, f"engines.judge.model={tmp_path}/judge")
    here, there = tmp_path / "judge", tmp_path / "there"
    for folder in (here, there):
        save_tokenizer(folder)
    (there / "chat_template.jinja").write_text("another")
    await check_frozen(context, "judge", there)
    async with reward_model(1.0) as url:
        await present(bus, publisher, url, 1)
        with pytest.raises(UnrecoverableError, match=r"first chat_template.jinja: found"):
            await asyncio.wait_for(RewardActor(context).run(), DEADLINE_S)
    shutil.rmtree(here)
    with pytest.raises(UnrecoverableError, match=r"judge is not there; expected its tokenizer"):
        await check_reader(context, "judge", here)


async def test_a_judge_that_never_comes_does_not_hold_up_the_end(
    tmp_path: Path, bus: Bus, publisher: Publisher
) -> None:
    options = ("reward.type=judge", "reward.args.engine=judge", "engines.judge.model=./judge")
    async with running(RewardActor(typed(tmp_path, bus, publisher, *options))):
        await asyncio.sleep(0)


@pytest.mark.slow
async def test_sglang_answers_in_the_form_that_a_judge_is_read_in(tmp_path: Path) -> None:
    """A server of its own: the session's has no tokenizer."""
    build(tmp_path / "model", seed=0)
    spec = EngineSpec(
        python=engine_python(), model=tmp_path / "model", label="frozen", log_file=tmp_path / "sglang.log",
        sglang={"max-total-tokens": 8192},
    )  # fmt: skip
    process = await EngineProcess.start(spec)
    texts: list[str] = []
    try:
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, START_TIMEOUT_S)
        options = JudgeReward(url=process.url, max_tokens=8, cache_entries=0, system="Judge.", deadline_s=60)
        backend = opened(options)
        for _ in range(2):
            read = functools.partial(_kept, texts, options)
            await backend.post(completion(options, "123+456="), read, PATH)
        await backend.close()
    finally:
        await process.stop()
    assert len(texts) == 2 and texts[0] == texts[1]


def _kept(texts: list[str], options: JudgeReward, reply: object) -> float:
    texts.append(chat_text(options, reply))
    return 1.0
