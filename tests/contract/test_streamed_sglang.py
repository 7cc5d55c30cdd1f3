"""Real engines that are killed or updated in the midst of streamed answers, checked by transformers token for token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from engine_fixture import LiveEngine, serve, start_engine
from engine_requests import PROMPT, TOKENS, prompt

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.process import EngineProcess
from physarum.agents.client import EngineClient
from physarum.agents.connections import open_session
from physarum.agents.fleet.choice import Wanted
from physarum.agents.protocols import Generation
from physarum.agents.routing import EngineRef
from physarum.agents.streaming import Received
from physarum.agents.tokenizer import FolderTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(400)]

REQUESTS = 6
CHUNK = 8
LONG = 800
SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@dataclass
class Fleet:
    """`doomed` has the weights of seed 1 under policy@1.0, `engine` those of seed 0; requests go to `open`."""

    engine: LiveEngine
    doomed: EngineProcess
    controls: dict[str, EngineControl] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    open: str = "engine"

    async def pick(self, deadline_s: float, wanted: Wanted) -> EngineRef:
        url = self.engine.url if self.open == "engine" else self.doomed.url
        return EngineRef(url, self.open, self.labels[self.open])

    def release(self, ref: EngineRef) -> None: ...

    def served(self, ref: EngineRef, made: int) -> None: ...

    def failed(self, ref: EngineRef, error: Exception) -> None: ...

    def kill(self) -> None:
        assert self.doomed.pid is not None
        root = psutil.Process(self.doomed.pid)
        for process in [*root.children(recursive=True), root]:
            process.kill()

    def worst(self, number: int, made: Generation, either: bool = False) -> float:
        """The largest distance, in nats, to the log-probability under the weights that the token's span names; `either`: under
        those of seed 0 or 1, whichever is nearer."""
        ids = [*prompt(number), *made.token_ids.tolist()]
        known = [self.engine.logprobs(seed, ids)[PROMPT - 1 :] for seed in (0, 1)]
        seeds = [self.seeds[span.version] for span in made.spans for _ in range(span.start, span.end)]
        return max(
            min(abs(float(found) - known[one][place]) for one in ((0, 1) if either else (seed,)))
            for place, (found, seed) in enumerate(zip(made.logprobs, seeds, strict=True))
        )


@pytest_asyncio.fixture
async def fleet(engine: LiveEngine, tmp_path: Path) -> AsyncIterator[tuple[Fleet, EngineClient]]:
    doomed = await start_engine(engine.weights(1), tmp_path / "doomed.log")
    try:
        async with open_session() as session:
            made = Fleet(engine, doomed)
            made.controls = {"engine": EngineControl(engine.url, session), "doomed": EngineControl(doomed.url, session)}
            made.labels = {"engine": await serve(engine, made.controls["engine"], seed=0), "doomed": "policy@1.0"}
            made.seeds = {made.labels["engine"]: 0, "policy@1.0": 1}
            client = EngineClient(
                session, made, FolderTokenizer(Path("unused")), cache_per_version=True, stream_tokens=CHUNK
            )
            yield made, client
    finally:
        await doomed.stop()


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Chunks:
    """Counts the tokens of each answer as they come."""
    found = Chunks()

    class Counted(Received):
        def take(self, event: bytes) -> None:
            super().take(event)
            found.took(self)

    monkeypatch.setattr("physarum.agents.client.Received", Counted)
    return found


class Chunks:
    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.grew = asyncio.Event()

    def took(self, received: Received) -> None:
        self.counts[id(received)] = received.count
        if len(self.counts) == REQUESTS and min(self.counts.values()) > 2 * CHUNK:
            self.grew.set()


async def test_killed_in_the_midst_of_answers_nothing_that_was_sent_is_lost(
    fleet: tuple[Fleet, EngineClient], chunks: Chunks
) -> None:
    engines, client = fleet
    engines.open = "doomed"
    asked = [
        asyncio.create_task(client.generate(prompt(number), SAMPLING, max_new_tokens=TOKENS))
        for number in range(REQUESTS)
    ]
    await chunks.grew.wait()
    engines.open = "engine"
    engines.kill()
    answers = await asyncio.gather(*asked)
    for number, made in enumerate(answers):
        (kept, rest) = made.spans
        assert (kept.version, rest.version) == ("policy@1.0", engines.labels["engine"])
        assert kept.end > 2 * CHUNK and rest.end == len(made.token_ids) == TOKENS
        assert not made.flaws and not made.conservative
        assert engines.worst(number, made) < 1e-3
    counted = client.replay.pop()["lost"]
    assert (counted.times, counted.interrupted) == (
        REQUESTS,
        REQUESTS * PROMPT + sum(made.spans[0].end for made in answers),
    )


async def test_an_update_in_the_midst_of_answers_is_seen_exactly_in_whole_ones_and_named_in_broken_ones(
    fleet: tuple[Fleet, EngineClient], chunks: Chunks
) -> None:
    """Odd requests end whole after the update; the even ones are killed later, with tokens of both weights."""
    engines, client = fleet
    engines.open = "doomed"
    asked = [
        asyncio.create_task(client.generate(prompt(number), SAMPLING, max_new_tokens=TOKENS if number % 2 else LONG))
        for number in range(REQUESTS)
    ]
    await chunks.grew.wait()
    control = engines.controls["doomed"]
    await control.pause("retract")
    await control.update_from_disk(engines.engine.weights(0), "policy@1.9999", "retract")
    await control.continue_generation()
    engines.seeds["policy@1.9999"] = 0
    for number, made in zip(range(1, REQUESTS, 2), await asyncio.gather(*asked[1::2]), strict=True):
        assert [span.version for span in made.spans] == ["policy@1.0", "policy@1.9999"]
        assert not made.conservative and engines.worst(number, made) < 1e-3
    engines.open = "engine"
    engines.kill()
    for number, made in zip(range(0, REQUESTS, 2), await asyncio.gather(*asked[::2]), strict=True):
        assert [span.version for span in made.spans] == ["policy@1.0", engines.labels["engine"]]
        assert made.conservative and len(made.token_ids) == LONG and not made.flaws
        assert engines.worst(number, made, either=True) < 1e-3
