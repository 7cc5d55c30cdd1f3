"""A crash at every write, rename, lock and removal on a version's way: the engine has the old weights or the new ones, and
the next version arrives as if nothing had happened (xor deltas applied half, local copies of an earlier life)."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from checkpoint_service import TOKEN, publish, running_service, tensors
from test_weightsync_receiver import StubEngine, same

from physarum.bus.version import Version
from physarum.weightsync.area import SharedArea
from physarum.weightsync.errors import WeightSyncError
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

CALLS: list[tuple[Any, str]] = [
    (os, "pwrite"),
    (os, "ftruncate"),
    (os, "link"),
    (os, "replace"),
    (os, "fsync"),
    (fcntl, "flock"),
    (np, "copyto"),
    (shutil, "rmtree"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "mkdir"),
]


class Crash(BaseException):
    """The process is gone at this call: whoever handles errors must not see it."""


class Crasher:
    """Counts the calls, and fails the one numbered `at`, before it has an effect or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, after: bool) -> None:
        self.count = 0
        self.armed = False
        self._at, self._after = at, after
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            mine = self.count if self.armed else -1
            self.count += self.armed
            if mine == self._at and not self._after:
                raise Crash
            answer = original(*arguments, **options)
            if mine == self._at:
                raise Crash
            return answer

        return call


async def life(folder: Path, engine: StubEngine, number: int, area: SharedArea, crasher: Crasher | None) -> bool:
    """Processes from their start: publish `number`, apply it; False where they crash."""
    async with running_service(folder / "service", 1, -1.0, area) as service, aiohttp.ClientSession() as session:
        area.clear_filling("trainer-")
        client = CheckpointClient(service.url, TOKEN, session)
        receiver = Receiver(engine, Staging(area, "engine-0"), session, live=Version.parse(engine.label))
        if crasher is not None:
            crasher.armed = True
        try:
            manifest = await publish(service, client, number, tensors(number, changed=1 + number % 3), area=area)
            await receiver.apply(manifest, [service.url], TOKEN)
        except (Crash, WeightSyncError):
            return False
        finally:
            if crasher is not None:
                crasher.armed = False
    return True


def weights_of(number: int) -> dict[str, torch.Tensor]:
    return tensors(number, changed=1 + number % 3)


async def test_a_crash_at_any_call_leaves_old_or_new_and_the_next_version_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = crashed = 0
    for after in (False, True):
        at = 0
        while True:
            place = tmp_path / f"{after}-{at}"
            with monkeypatch.context() as patch:
                crasher = Crasher(patch, at, after)
                engine, area = StubEngine(), SharedArea(place / "area")
                assert await life(place, engine, 1, area, None)
                done = await life(place, engine, 2, area, crasher)
                found = int(engine.label.rsplit(".", 1)[1])
                assert found in (1, 2) and same(engine.weights, weights_of(found)), f"mixed after a crash at call {at}"
                assert await life(place, engine, 3, area, None), f"nothing arrives after a crash at call {at}"
                assert same(engine.weights, weights_of(3)), f"wrong weights after a crash at call {at}"
            shutil.rmtree(place)
            crashed += not done
            if crasher.count <= at:
                break
            at += 1
    assert at > 15 and crashed > at, "the calls that matter were not met"
