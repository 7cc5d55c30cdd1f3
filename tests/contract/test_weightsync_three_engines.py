"""Three real engines under traffic over a hundred versions: no request fails, no token has another version's weights.

Two engines are on the service's host, one by each of its transports, the third on a host of its own. Odd versions have one
set of weights, even ones another, so a token under a wrong label differs from transformers by nats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from checkpoint_service import TOKEN, Service, running_service
from engine_fixture import LiveEngine, engine_python, start_engine, tiny_model
from engine_requests import generate, spans, worst

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.delivery import transport_for
from physarum.bus.version import Version
from physarum.configs.engine import EngineConfig
from physarum.weightsync.area import SharedArea
from physarum.weightsync.layout import forms_in
from physarum.weightsync.publisher import upload
from physarum.weightsync.receiver import Receiver, SwapRecord
from physarum.weightsync.snapshot import Snapshot
from physarum.weightsync.staging import Staging

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UPDATES = 100
CLIENTS = 4
"""For each engine, one request after the other."""
TOKENS = 96
TOLERANCE = 1e-3
CHECKED = 40
"""Answers that transformers computes again, for each engine."""
SEEDS = (0, 2)


def seed_of(label: str) -> int:
    return SEEDS[Version.parse(label).number % 2]


@dataclass
class Served:
    """One engine, its receiver, and what its clients were answered."""

    engine: LiveEngine
    receiver: Receiver
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    under_way: set[int] = field(default_factory=set)
    crossed: set[int] = field(default_factory=set)
    """Requests that were under way when an update began."""
    numbers: Iterator[int] = field(default_factory=count)

    async def client(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = next(self.numbers) % 400
            self.under_way.add(number)
            self.answers.append((number, await generate(self.engine, number, tokens=TOKENS)))
            self.under_way.discard(number)


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running_service(
        tmp_path / "service", keep_last=3, area=SharedArea(tmp_path / "trainers-host")
    ) as running:
        yield running


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[list[Served]]:
    model = tmp_path / "seed-0"
    tiny_model(0).save_pretrained(model)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        processes = await asyncio.gather(
            *(start_engine(model, tmp_path / f"sglang-{number}.log") for number in range(3))
        )
        for process in processes:
            stack.push_async_callback(process.stop)
        made = []
        for number, (process, kind) in enumerate(zip(processes, ("disk", "ipc", "disk"), strict=True)):
            control = EngineControl(process.url, session)
            area = SharedArea(tmp_path / ("trainers-host" if number < 2 else "another-host"))
            staging, log = Staging(area, f"engine-{number}"), tmp_path / f"agent-{number}.log"
            transport = await transport_for(
                EngineConfig(transport=kind), control, staging, engine_python(), log, f"engine-{number}"
            )
            receiver = Receiver(
                control,
                staging,
                session,
                live=Version("policy", 1, 0),
                expected=forms_in(model),
                transport=transport,
                keep_last=3,
            )
            stack.push_async_callback(receiver.close)
            made.append(Served(LiveEngine(process, model, tmp_path), receiver))
        yield made


async def test_a_hundred_versions_reach_three_engines_and_no_request_notices(
    service: Service, served: list[Served], tmp_path: Path, record_property: Any
) -> None:
    stop, area = asyncio.Event(), SharedArea(tmp_path / "trainers-host")
    clients = [asyncio.create_task(one.client(stop)) for one in served for _ in range(CLIENTS)]
    swaps: list[SwapRecord] = []
    async with aiohttp.ClientSession() as session:
        for number in range(1, UPDATES + 1):
            for one in served:
                one.crossed |= one.under_way
            version = Version("policy", 1, number)
            weights = served[0].engine.reference(seed_of(str(version))).state_dict().items()
            snapshot = Snapshot.take(weights, area=area, name=f"trainer-{version}")
            try:
                manifest = await upload(
                    snapshot, version, service.url, TOKEN, 30.0, session=session, model_digest="tiny", step=number
                )
            finally:
                snapshot.close()
            swaps += await asyncio.gather(*(one.receiver.apply(manifest, [service.url], TOKEN) for one in served))
    stop.set()
    await asyncio.gather(*clients)  # a request that failed raises here
    for one in served:
        check_answers(one)
    pauses = [swap.pause_s for swap in swaps]
    record_property("pause_s_p50_p99", [float(np.quantile(pauses, share)) for share in (0.5, 0.99)])
    assert len(swaps) == UPDATES * len(served)
    assert sum(one.receiver.checksum_failures for one in served) == 0


def check_answers(one: Served) -> None:
    """Whole, each token under one version, versions in order, and all that were under way at an update among them."""
    assert one.crossed and one.crossed <= {number for number, _ in one.answers}
    seen: set[str] = set()
    for _, answer in one.answers:
        found = spans(answer)
        assert answer["meta_info"]["finish_reason"]["type"] == "length" and len(answer["output_ids"]) == TOKENS
        assert [start for _, start, _ in found] == [0, *(end for _, _, end in found[:-1])] and found[-1][2] == TOKENS
        versions = [Version.parse(label) for label, _, _ in found]
        assert versions == sorted(set(versions))
        seen |= {label for label, _, _ in found}
    assert len(seen) > UPDATES / 2, "most versions made tokens"
    several = sorted(one.answers, key=lambda pair: -len(spans(pair[1])))
    assert len(spans(several[0][1])) > 1, "some request saw more than one version"
    for number, answer in several[:CHECKED]:
        for label, start, end in spans(answer):
            assert worst(one.engine, number, answer, start, end, seed_of(label)) < TOLERANCE, (number, label)
