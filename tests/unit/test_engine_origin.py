"""Where an engine's manifest comes from: the service, the store where that is silent, never another than the head's."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from actor_fixture import BASE
from test_versions_mirror import copying, version

from physarum.actors.engine.origin import Origin
from physarum.actors.engine.relaying import Relay
from physarum.actors.engine.trials import Wanted
from physarum.actors.mirror.asking import versions_url
from physarum.actors.policy_engines import head_key
from physarum.bus.presence import Heartbeat
from physarum.configs.loader import resolve
from physarum.configs.overrides import parse_command_line
from physarum.configs.root import RootConfig
from physarum.weightsync.errors import BucketUnfitError, ObjectAbsentError, ServiceUnreachableError
from physarum.weightsync.manifest import manifest_digest

NOBODY = "http://127.0.0.1:9"


def config(place: Path, *words: str) -> RootConfig:
    recipe = place / "recipe.yaml"
    recipe.write_text(BASE)
    return resolve(recipe, parse_command_line(list(words)))


def origin(found: RootConfig, session: aiohttp.ClientSession) -> Origin:
    return Origin(cast(Any, SimpleNamespace(config=found)), found.engines["policy"], session)


async def test_the_store_is_asked_where_no_service_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = config(tmp_path, f"checkpoint.versions.mirror=file://{tmp_path}/bucket")
    url, made = versions_url(found), version(1)
    assert url == f"file://{tmp_path}/bucket/test/weights"
    copying(url).copy(made[0], made[1].__getitem__, {})
    async with aiohttp.ClientSession() as session:
        one = origin(found, session)
        for urls in ([NOBODY], []):
            assert await one.manifest(Wanted("policy@1.1", manifest_digest(made[0])), urls) == made[0]
        assert "is looked for in file://" in caplog.text
        with pytest.raises(BucketUnfitError, match=r"has policy@1.1 with a manifest of digest .*, the bus names abc"):
            await one.manifest(Wanted("policy@1.1", "abc"), [])
        # Of what passed before a canary's trial said with which manifest.
        with pytest.raises(BucketUnfitError, match="the bus names none"):
            await one.manifest(Wanted("policy@1.1", ""), [])
        with pytest.raises(ObjectAbsentError):
            await one.manifest(Wanted("policy@1.2", "abc"), [])
        await one.close()
        plain = origin(config(tmp_path), session)
        with pytest.raises(ServiceUnreachableError):
            await plain.manifest(Wanted("policy@1.1", "abc"), [NOBODY])
        await plain.close()


async def test_who_reads_the_store_alone_asks_no_service_and_only_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = config(
        tmp_path, f"checkpoint.versions.mirror=file://{tmp_path}/bucket", "engines.policy.weights_from=mirror"
    )
    assert head_key(found, "policy") == ("mirrored", "policy")
    beat = SimpleNamespace(facts={"url": NOBODY})
    async with aiohttp.ClientSession() as session:
        assert origin(found, session).urls(cast(Any, SimpleNamespace(members=[beat]))) == []
        assert origin(config(tmp_path), session).urls(cast(Any, SimpleNamespace(members=[beat]))) == [NOBODY]
    monkeypatch.setenv("PHYSARUM_RACK", "b")
    relay = Relay(cast(Any, SimpleNamespace(config=found, host="here")), None)
    near, far = (_receiver(rack) for rack in ("b", "a"))
    relay._peers = cast(Any, SimpleNamespace(members=[near, far]))
    assert relay.peers(same_rack=True) == ["http://host-b"]
    assert relay.peers() == ["http://host-b", "http://host-a"]


def _receiver(rack: str) -> Heartbeat:
    return Heartbeat(
        role="engine", instance=f"policy-{rack}", state="ready", pid=os.getpid(), host=f"host-{rack}", started_at=0.0,
        sequence=1, facts={"chunks": f"http://host-{rack}", "rack": rack},
    )  # fmt: skip
