"""B4 on GPUs: from a trainer's step on its device to a real SGLang that serves the version, under running requests.

    python -m tests.bench.b4_gpu --shape 0.6B --transports ipc,disk,http --out B4-gpu.json

    ipc    trainer's host memory -> the agent's device memory -> the engine (one host)
    http   the same, but the version is fetched over loopback into an area of its own first
    disk   the engine reads the file in shared memory
    nccl   broadcast from the trainer's device to the agent beside the engine, on another GPU

Trainer and receiver are this process, weights service, agents and engine are their own. `passes` are what a version must go
through, measured in the same run: they are the limit. Random weights; the model's shape is the named Qwen3's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import aiohttp
import msgspec
import torch

from physarum.actors.engine.control import EngineControl
from physarum.actors.engine.delivery import transport_for
from physarum.actors.engine.environment import engine_python
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.actors.trainer.broadcasting import adopted
from physarum.bus.version import Version
from physarum.configs.engine import EngineConfig
from physarum.weightsync.area import SharedArea
from physarum.weightsync.broadcast import Round
from physarum.weightsync.device.owner import DeviceAgent
from physarum.weightsync.device.snapshot import FlatBuffer
from physarum.weightsync.publisher import upload
from physarum.weightsync.receiver import Receiver
from physarum.weightsync.service_client import CheckpointClient
from physarum.weightsync.staging import Staging
from physarum.weightsync.transports.nccl import NcclTransport
from tests.bench import host
from tests.bench.models import SHAPES, qwen3
from tests.bench.processes import ROOT
from tests.bench.weights_line import Part
from tests.bench.weights_parts import PartSpec

REQUESTS: Final = 64
TOKENS: Final = 1500
LIMIT_S: Final = 120.0
Mode = Literal["full", "delta"]


class TrainerModel:
    """Tensors on the trainer's device; a change makes all, or one in a hundred bytes, others."""

    def __init__(self, shape: str, folder: Path) -> None:
        model = qwen3(shape, torch.bfloat16)
        model.save_pretrained(folder)
        state = model.state_dict()
        self.tensors = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def change(self, mode: Mode) -> int:
        """Bytes that are now others."""
        changed, limit = 0, self.size_bytes if mode == "full" else self.size_bytes // 100
        for name, tensor in self.tensors.items():
            if mode == "delta" and (changed + tensor.nbytes > limit or not name.startswith("model.layers")):
                continue
            tensor.view(torch.int16).bitwise_xor_(1)
            changed += tensor.nbytes
        return changed


class Traffic:
    """Requests that run all the time: each that ends is followed by another, until `ended`."""

    def __init__(self, url: str, session: aiohttp.ClientSession, vocabulary: int) -> None:
        self._url = url
        self._session = session
        self._vocabulary = vocabulary
        self.finished = self.wrong = self.tokens = 0
        self._stop = False
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(REQUESTS)]

    async def ended(self) -> dict[str, int]:
        self._stop = True
        await asyncio.gather(*self._tasks)
        return {"requests": self.finished + self.wrong, "not_whole": self.wrong, "tokens": self.tokens}

    async def _run(self, number: int) -> None:
        while not self._stop:
            ids = [(17 * number + 31 * place) % self._vocabulary for place in range(64)]
            sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
            async with self._session.post(
                f"{self._url}/generate", json={"input_ids": ids, "sampling_params": sampling},
                timeout=aiohttp.ClientTimeout(total=300),
            ) as answer:  # fmt: skip
                found = await answer.json()
            meta = found.get("meta_info", {}) if isinstance(found, dict) else {}
            whole = answer.status == 200 and meta.get("completion_tokens") == TOKENS
            self.tokens += int(meta.get("completion_tokens", 0))
            self.finished += whole
            self.wrong += not whole


class Bench:
    """One engine, one trainer, one service; a receiver for each transport."""

    def __init__(
        self, place: Path, model: TrainerModel, engine: EngineProcess, session: aiohttp.ClientSession, url: str
    ) -> None:
        self.place, self.model, self.engine, self.session, self.url = place, model, engine, session, url
        self.area = SharedArea(place / "trainer")
        self.buffer = FlatBuffer(4 << 20)
        self.number = 0
        self.rounds, self.warm = 5, 3
        self.sender: DeviceAgent | None = None
        self.port = 0

    async def row(self, name: str, pause: Literal["in_place", "retract"]) -> list[dict[str, Any]]:
        """Full versions and deltas by one transport."""
        settings = EngineConfig(transport="ipc" if name == "http" else name, env=_path(), update_timeout_s=LIMIT_S)
        control = EngineControl(self.engine.url, self.session, update_timeout_s=LIMIT_S)
        area = SharedArea(self.place / "other") if name == "http" else self.area
        staging = Staging(area, name)
        transport = await transport_for(
            settings, control, staging, engine_python(EngineConfig()), self.place / f"{name}.agent.log", "engine-0"
        )
        receiver = Receiver(
            control, staging, self.session, mode=pause, transport=transport, keep_last=1, chunk_timeout_s=LIMIT_S
        )
        rows = []
        try:
            if isinstance(transport, NcclTransport):
                await self._form()
            for mode in ("full", "delta"):
                found = [await self._round(receiver, transport, mode) for _ in range(self.rounds + self.warm)][
                    self.warm :
                ]
                middle = {key: round(median(one[key] for one in found), 5) for key in found[0]}
                worst = max(one["pause_s"] for one in found)
                rows.append({"transport": name, "pause": pause, "mode": mode, **middle, "pause_max_s": round(worst, 5)})
                print(json.dumps(rows[-1]), flush=True)
        finally:
            await receiver.close()
            if self.sender is not None:
                self.sender.close()
        return rows

    async def _round(self, receiver: Receiver, transport: Any, mode: Mode) -> dict[str, float]:
        changed = self.model.change(mode)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.number += 1
        version = Version("policy", 1, self.number)
        began = time.perf_counter()
        taken = await asyncio.to_thread(self.buffer.take, self.model.tensors.items)
        stall_s = time.perf_counter() - began
        sending = asyncio.create_task(self._send(version, transport))
        snapshot = await asyncio.to_thread(taken.on_host, self.area, f"trainer-{version}")
        host_s = time.perf_counter() - began
        manifest = await upload(
            snapshot, version, self.url, None, LIMIT_S, session=self.session, model_digest="m", step=self.number
        )
        await asyncio.to_thread(snapshot.close)
        published_s = time.perf_counter() - began
        manifest = await CheckpointClient(self.url, None, self.session).get_manifest(manifest.label)
        swap = await receiver.apply(manifest, [self.url], None)
        serving_s = time.perf_counter() - began
        broadcast_s = await sending
        return {
            "serving_s": serving_s, "stall_s": stall_s, "host_s": host_s, "published_s": published_s,
            "fetch_s": swap.fetch_s, "pause_s": swap.pause_s, "broadcast_s": broadcast_s, "bytes_changed": changed,
            "bytes_applied": swap.bytes_applied,
        }  # fmt: skip

    async def _form(self) -> None:
        """The sender of broadcasts, as the trainer's publication makes it."""
        self.buffer.take(self.model.tensors.items)
        self.sender = DeviceAgent(Path(sys.executable), os.environ, self.place / "sender.log", LIMIT_S)
        self.port = (await asyncio.to_thread(self.sender.call, "open", LIMIT_S, host="127.0.0.1"))["port"]
        await asyncio.to_thread(self.sender.call, "adopt", LIMIT_S, buffer=adopted(self.buffer))

    async def _send(self, version: Version, transport: Any) -> float:
        if not isinstance(transport, NcclTransport) or self.sender is None:
            return 0.0
        one = Round(name="1.1", epoch=1, label=str(version), host="127.0.0.1", port=self.port, members=("engine-0",),
                    until=time.time() + LIMIT_S)  # fmt: skip
        transport.join(one)
        arguments = {"name": "1.1", "label": str(version), "layout": self.buffer.layout(),
                     "size": self.buffer.size_bytes, "members": 1, "timeout_s": LIMIT_S}  # fmt: skip
        answer = await asyncio.to_thread(self.sender.call, "send", 2 * LIMIT_S, arguments=arguments)
        return float(answer["seconds"])


def _path() -> dict[str, str]:
    """The engine is told where SGLang lies, and on which device it is."""
    found = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    if torch.cuda.device_count() > 1:
        found["CUDA_VISIBLE_DEVICES"] = "1"
    return found


def passes(model: TrainerModel) -> dict[str, float]:
    """Seconds of each pass over the whole model, the best of three."""
    if not torch.cuda.is_available():
        return {}
    from physarum.weightsync.device.multilinear import ROW_BYTES, digests

    size = -(-model.size_bytes // ROW_BYTES) * ROW_BYTES
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    pinned = torch.empty(min(size, 1 << 30), dtype=torch.uint8, pin_memory=True)
    part = size / pinned.numel()
    chunks = [(start, min(4 << 20, size - start)) for start in range(0, size, 4 << 20)]
    source = source.zero_()
    wire = {"bare_broadcast_s": _bare_broadcast(size)} if torch.cuda.device_count() > 1 else {}
    return wire | {
        "device_copy_s": _best(lambda: target.copy_(source)),
        "device_digest_s": _best(lambda: digests(source, chunks)),
        "to_host_s": part * _best(lambda: pinned.copy_(source[: pinned.numel()])),
        "from_host_s": part * _best(lambda: source[: pinned.numel()].copy_(pinned)),
    }


def _bare_broadcast(size: int) -> float:
    command = [sys.executable, "-m", "tests.bench.bare_broadcast", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return round(float(done.stdout.split()[-1]), 5) if done.returncode == 0 else float("nan")


def _best(work: Any) -> float:
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return round(min(found), 5)


@contextlib.asynccontextmanager
async def _engine(
    place: Path, arguments: dict[str, Any], session: aiohttp.ClientSession
) -> AsyncIterator[EngineProcess]:
    spec = EngineSpec(python=engine_python(EngineConfig()), model=place / "model", label="policy@1.0", sglang=arguments,
                      log_file=place / "sglang.log", environment=_path())  # fmt: skip
    process = await EngineProcess.start(spec)
    try:
        await process.wait_healthy(session, 400)
        yield process
    finally:
        await process.stop()


@contextlib.contextmanager
def _service(place: Path) -> Iterator[Part]:
    part = Part("service", PartSpec("service", str(place), str(place / "trainer")))
    try:
        yield part
    finally:
        part.stop()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {"skip-tokenizer-init": True, "disable-radix-cache": True}
    if torch.cuda.is_available():
        arguments |= {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
                      "mem-fraction-static": 0.3, "cuda-graph-max-bs": REQUESTS, "context-length": 4096,
                      "dtype": "bfloat16"}  # fmt: skip
        if options.chunked_prefill is not None:
            arguments |= {"chunked-prefill-size": options.chunked_prefill}
    else:
        arguments |= {"max-total-tokens": 131072}
    with tempfile.TemporaryDirectory(prefix="b4-", dir=options.place) as name:
        place = Path(name)
        began = time.perf_counter()
        model = TrainerModel(options.shape, place / "model")
        made_s = time.perf_counter() - began
        with _service(place) as part:
            url = msgspec.json.decode(await part.answer())["url"]
            connector = aiohttp.TCPConnector(limit=0)
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                _engine(place, arguments, session) as engine,
            ):
                started_s = time.perf_counter() - began - made_s
                print(f"model {made_s:.0f} s, engine {started_s:.0f} s", flush=True)
                bench = Bench(place, model, engine, session, url)
                bench.rounds, bench.warm = options.rounds, options.warm
                bench.buffer.take(model.tensors.items)
                limits = await asyncio.to_thread(passes, model)
                print(json.dumps(limits), flush=True)
                head = {
                    "bench": "B4-gpu", "shape": options.shape, "bytes": model.size_bytes, "host": host.describe(),
                    "versions": host.versions(), "devices": torch.cuda.device_count(), "running_requests": REQUESTS,
                    "place": str(options.place), "chunked_prefill": options.chunked_prefill,
                    "engine_start_s": round(started_s, 1), **limits,
                }  # fmt: skip
                rows: list[dict[str, Any]] = []
                traffic = Traffic(engine.url, session, SHAPES[options.shape]["vocab_size"])
                await asyncio.sleep(2)
                try:
                    for transport in options.transports.split(","):
                        for pause in ("in_place", "retract"):
                            rows += await bench.row(transport, pause)
                            _keep(options.out, head | {"rows": rows})
                finally:
                    ended = await traffic.ended()
                print(json.dumps(ended), flush=True)
                return head | ended | {"rows": rows}


def _keep(out: Path | None, result: dict[str, Any]) -> None:
    """What was measured so far, too."""
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--transports", default="ipc,disk,http")
    parser.add_argument(
        "--chunked-prefill", type=int, help="tokens of a prefill batch: what a pause may have to wait for"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured; the median of them is given")
    parser.add_argument("--warm", type=int, default=3, help="rounds before them")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="memory for seven versions")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    print(json.dumps(result, indent=1))
    _keep(options.out, result)


if __name__ == "__main__":
    main()
