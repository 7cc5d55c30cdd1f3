"""B7: tokens/s through physarum (source, rollout, reward, bus, records) against a bare client, on the same real engine.

Same prompts, lengths, concurrency and request fields on both sides, in turn A B B A; every token counted for physarum is
found in SAMPLES, and how many requests the engine had is asked twice a second. A rate is taken over the middle of a side's
tokens. On CUDA the model has the shape of Qwen3-0.6B, on CPU that of the calculator's; random weights. Further sides of
physarum: `--stream-tokens N`, answers in chunks of N tokens; `--fixed-limit`, as many requests at the engine as there are slots
from the start. `--place FOLDER` keeps the engine's log and the runs; `windows` of a row says when each side was measured (Unix
seconds).

    python -m tests.bench.b7_throughput --concurrency 64,256 --pairs 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import aiohttp
import torch

from physarum.actors.engine.environment import engine_python
from physarum.actors.engine.process import EngineProcess, EngineSpec
from physarum.configs.engine import EngineConfig
from tests.bench.b7_sides import Load, Settings, bare, middle, occupancy, physarum, tokens_per_s, window
from tests.bench.models import SHAPES, save_qwen3

_log = logging.getLogger(__name__)

TARGET: Final = 0.97
_START_S: Final = 400.0


async def measure(size: str) -> dict[str, Any]:
    """The fields of B7 on this host's device."""
    if torch.cuda.is_available():
        return await pairs("0.6B", [64, 256], waves=8, mean=256, count=5, rollouts=4)
    if size == "smoke":
        return await pairs("calculator", [8], waves=4, mean=24, count=1, rollouts=1)
    return await pairs("calculator", [8, 32], waves=12, mean=64, count=5, rollouts=1)


async def pairs(
    shape: str,
    concurrencies: list[int],
    *,
    waves: int,
    mean: int,
    count: int,
    rollouts: int,
    further: dict[str, Settings] | None = None,
    keep: Path | None = None,
) -> dict[str, Any]:
    """`count` pairs a concurrency; a side has `waves` requests for each slot. `keep`: a folder that stays."""
    with tempfile.TemporaryDirectory(prefix="b7-") as name:
        place = keep or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        vocabulary = await asyncio.to_thread(save_qwen3, place / "model", shape)
        async with _engine(place, max(concurrencies)) as url:
            rows = []
            for concurrency in concurrencies:
                load = Load(place / "model", url, vocabulary, concurrency, waves * concurrency, mean, rollouts)
                await bare(load)  # compiles what this batch size needs
                rows.append(await _row(load, place, count, further or {}))
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    found = {"device": device, "shape": shape, "target": TARGET, "pairs": count, "rows": rows}
    return found | ({"further": further} if further else {})


async def _row(load: Load, place: Path, count: int, further: dict[str, Settings]) -> dict[str, Any]:
    rates: dict[str, list[float]] = {side: [] for side in ("physarum", "bare", *further)}
    engines: dict[str, list[float]] = {side: [] for side in rates}
    windows: dict[str, list[list[float]]] = {side: [] for side in rates}
    for pair in range(count):
        for side in rates if pair % 2 == 0 else reversed(rates):
            async with occupancy(load.engine_url) as there:
                if side == "bare":
                    completions = await bare(load)
                else:
                    name = f"c{load.concurrency}-{side}-{pair}"
                    completions = await physarum(load, place, name, further.get(side, {}))
            rates[side].append(tokens_per_s(completions))
            engines[side].append(middle(there, completions))
            windows[side].append([round(at, 1) for at in window(completions)])
            _log.info("%d, %s: %.0f tok/s, %.1f there", load.concurrency, side, rates[side][-1], engines[side][-1])
    ours, theirs = rates.pop("physarum"), rates.pop("bare")
    row = {
        "concurrency": load.concurrency,
        "at_the_engine": {side: round(median(found), 1) for side, found in engines.items()},
        "windows": windows,
        "physarum_tok_s": round(median(ours)),
        "bare_tok_s": round(median(theirs)),
        **_ratio("ratio", ours, theirs),
    }
    for side, found in rates.items():
        row |= _ratio(f"{side}_ratio", found, theirs)
    return row


def _ratio(name: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The median of the pairs' ratios, and its quartiles."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        name: round(median(ratios), 4),
        "iqr" if name == "ratio" else f"{name}_iqr": [round(low, 4), round(high, 4)],
    }


@asynccontextmanager
async def _engine(place: Path, concurrency: int) -> AsyncIterator[str]:
    arguments: dict[str, Any] = {"disable-radix-cache": True, "max-running-requests": concurrency}
    if torch.cuda.is_available():
        arguments |= {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none",
                      "mem-fraction-static": 0.5, "cuda-graph-max-bs": concurrency, "context-length": 4096,
                      "dtype": "bfloat16"}  # fmt: skip
    else:
        arguments |= {"max-total-tokens": 131072}
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    spec = EngineSpec(python=engine_python(EngineConfig()), model=place / "model", label="policy@1.0", sglang=arguments,
                      log_file=place / "sglang.log", environment=path)  # fmt: skip
    process = await EngineProcess.start(spec)
    try:
        async with aiohttp.ClientSession() as session:
            await process.wait_healthy(session, _START_S)
        yield process.url
    finally:
        await process.stop()


def main() -> None:
    """For a size of one's own; `make bench B=B7` is the fixed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B" if torch.cuda.is_available() else "calculator")
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--waves", type=int, default=8)
    parser.add_argument("--mean", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int)
    parser.add_argument("--fixed-limit", action="store_true")
    parser.add_argument("--place", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    sizes = [int(one) for one in options.concurrency.split(",")]
    further: dict[str, Settings] = {}
    if options.stream_tokens is not None:
        further["streamed"] = {"rollout.stream_tokens": options.stream_tokens}
    if options.fixed_limit:
        further["fixed"] = {"engines.policy.concurrency": {"floor": max(sizes), "start": max(sizes)}}
    found = pairs(
        options.shape,
        sizes,
        waves=options.waves,
        mean=options.mean,
        count=options.pairs,
        rollouts=options.rollouts,
        further=further,
        keep=options.place,
    )
    print(json.dumps(asyncio.run(found)))


if __name__ == "__main__":
    main()
