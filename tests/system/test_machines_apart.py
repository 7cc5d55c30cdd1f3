"""Two machines with nothing in common but a network: each in a namespace of its own, with its own loopback, address and name.

Whatever is announced to others and is not reached there would stop the run. Needs the right to make network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from physarum.actors.context import RunFolder
from physarum.bus.server import binary
from tests.bench.chaos import RECIPE
from tests.bench.chaos_run import ChaosRun, stub_overrides

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(300)]

NAME, TOKEN, STEPS = "apart", "PHYSARUM_TEST_TOKEN", 8


class Host(NamedTuple):
    """A namespace, and how a command is run in it under a host name of its own."""

    namespace: str
    address: str

    def words(self) -> list[str]:
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-c", 'hostname "$0"; exec "$@"', self.namespace]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two, joined by a pair of virtual devices; skips where they may not be made."""
    made = tuple(Host(f"ph{os.getpid()}{name}", f"10.231.77.{place}") for place, name in ((1, "a"), (2, "b")))
    devices = [f"ph{os.getpid()}v{place}" for place in (1, 2)]
    try:
        try:
            for one in made:
                ip("netns", "add", one.namespace)
                ip("-n", one.namespace, "link", "set", "lo", "up")
            peer = ["type", "veth", "peer", "name", devices[1], "netns", made[1].namespace]
            ip("link", "add", devices[0], "netns", made[0].namespace, *peer)
            for one, device in zip(made, devices, strict=True):
                ip("-n", one.namespace, "addr", "add", f"{one.address}/24", "dev", device)
                ip("-n", one.namespace, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made[0], made[1]
    finally:
        for one in made:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "del", one.namespace)


class HostRun(ChaosRun):
    """A supervisor on one of the hosts."""

    def __init__(self, place: Path, host: Host, bus: str, machine: str, journal: Path) -> None:
        place.mkdir()
        gpu = {"count": 1, "engines": {"policy": 2}, "rollout": 2, "reward": 1}
        values: dict[str, Any] = {
            "extends": str(RECIPE),
            "machines": {"gpu": gpu},
            "bus": {"url": bus},
            "checkpoint": {"token_env": TOKEN},
        }
        (place / "apart.yaml").write_text(yaml.safe_dump(values))
        settings = [*stub_overrides(journal), f"stop.steps={STEPS}", "--machine", machine]
        super().__init__(place / "apart.yaml", place, NAME, settings)
        self._command = [*host.words(), *self._command]
        if machine != "head":
            self.folder = RunFolder(place / f"{NAME}@{machine}")


@contextlib.contextmanager
def nats(host: Host, store: Path) -> Iterator[str]:
    """A server that the other host reaches."""
    command = [*host.words(), str(binary()), "-js", "-sd", str(store), "-a", "0.0.0.0", "-p", "4222"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield f"nats://{host.address}:4222"
    finally:
        process.terminate()
        process.wait(20)


async def test_the_run_is_trained_by_engines_and_workers_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "correct-horse")
    with hosts() as (first, second), nats(first, tmp_path / "store") as bus:
        head = HostRun(tmp_path / "head", first, bus, "head", tmp_path / "journal")
        machine = HostRun(tmp_path / "gpu", second, bus, "gpu-0", tmp_path / "journal")
        try:
            await head.up()
            monkeypatch.setenv("PHYSARUM_CACHE", str(tmp_path / "cache"))
            await machine.up()
            summary = await head.ended()
            machine._wait(60.0)
        finally:
            machine.stop()
            head.stop()
    assert json.loads((machine.folder.path / "start_model.json").read_text())["origin"] == "head"
    account = summary["account"]
    assert summary["steps"] == STEPS and account["trained"] > 0
    assert (account["imbalance"], account["dead"], account["double_trained"]) == (0, 0, 0)
