"""B4, weights: from the end of an optimizer step to engines that serve the new version.

    held   engines on the trainer's host: the snapshot is the version; each engine verifies it and copies what changed
    http   each engine on a host of its own (an area of its own), over loopback

    full      all is another       delta     one tensor of a hundred is another
    elements  one element of a hundred is, in every tensor (http: chunks as what differs, weightsync/difference.py)

Trainer, service and every engine are processes. Engines copy into memory and generate nothing (`stub`); one row per
transport is real SGLang on a small model. limit_s is the sum of the passes that must be made, at the rates measured in this
run: snapshot, hash of all, transfer, verify and apply of what changed. Rounds before memory is used again are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

import aiohttp
import msgspec

from physarum.weightsync.area import SharedArea
from tests.bench import host
from tests.bench.weights_line import TENSORS, Line, Model, Part
from tests.bench.weights_parts import Applied, PartSpec
from tests.bench.weights_rates import disk_reload_s, hash_gib_s, loopback_gib_s
from tests.bench.weights_real import real_rounds

_GIB: Final = 1 << 30
_WARM: Final = 2
_TENSORS_CHANGED: Final = {"full": TENSORS, "delta": TENSORS // 100}
_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Load:
    """`rounds` full versions and as many deltas of 1 %, after two that are not counted."""

    transport: str
    size_bytes: int
    engines: int
    rounds: int = 5


LOADS: Final = {
    "smoke": [Load("held", 100 << 20, 1, 3), Load("http", 100 << 20, 2, 3)],
    "full": [
        *(Load("held", 500_000_000, engines) for engines in (1, 2, 4, 8)),
        *(Load("http", 500_000_000, engines) for engines in (1, 2, 4, 8)),
        *(Load("held", 1_500_000_000, engines) for engines in (1, 4)),
        Load("http", 1_500_000_000, 1),
        Load("held", 7_000_000_000, 1, 3),
    ],
}


async def measure(size: str) -> dict[str, Any]:
    """The fields of B4."""
    rates = {"memcpy_gib_s": round(host.memcpy_gib_s(), 2), "hash_gib_s": round(hash_gib_s(), 2)}
    rates["loopback_gib_s"] = round(await loopback_gib_s(), 2)
    rows: list[dict[str, Any]] = []
    joins: dict[str, Any] = {}
    for load in LOADS[size]:
        found, joined = await _measured(load, rates, joins=load.transport not in joins)
        rows += found
        if joined:
            joins[load.transport] = joined
    with tempfile.TemporaryDirectory(prefix="b4-", dir=_MEMORY) as place:
        rounds = 3 if size == "smoke" else 20
        async for transport, total, seconds, applied, stalls in real_rounds(Path(place), rounds, _WARM):
            rows.append(_row(f"{transport}, SGLang", 1, "full", total, total, seconds, applied, stalls, rates))
    return {
        "rows": rows,
        **rates,
        "late_join_s": {name: joined["late_join_s"] for name, joined in joins.items()},
        "one_transfer_s": {name: joined["one_transfer_s"] for name, joined in joins.items()},
        "trainer_stall_s": {f"{row['transport']} {row['bytes']}": row["trainer_stall_s"] for row in rows},
        "disk_reload_s": await asyncio.to_thread(disk_reload_s, LOADS[size][0].size_bytes),
        "checksum_failures": sum(row["checksum_failures"] for row in rows),
    }


async def _measured(
    load: Load, rates: dict[str, float], joins: bool
) -> tuple[list[dict[str, Any]], dict[str, float] | None]:
    """The rows of a load and, where `joins`, what an engine that comes late needs."""
    async with _line(load) as line:
        rows = []
        for mode in ("full", "delta", *(["elements"] if load.transport == "http" else [])):
            for _ in range(1 + (_WARM if mode == "full" else 0)):
                line.model.change(range(TENSORS))
                await line.round()
            rows.append(await _rounds(load, line, mode, rates))
        return rows, await _late_join(load, line) if joins else None


async def _rounds(load: Load, line: Line, mode: str, rates: dict[str, float]) -> dict[str, Any]:
    seconds, applied, stalls, total = [], [], len(line.stalls), line.model.size_bytes
    for _ in range(load.rounds):
        changed = line.model.nudge() if mode == "elements" else line.model.change(range(_TENSORS_CHANGED[mode]))
        times, swaps = await line.round()
        seconds += times
        applied += swaps
    name = f"{load.transport}, stub"
    return _row(name, load.engines, mode, total, changed, seconds, applied, line.stalls[stalls:], rates)


def _row(
    transport: str,
    engines: int,
    mode: str,
    total: int,
    changed: int,
    seconds: list[float],
    applied: list[Applied],
    stalls: list[float],
    rates: dict[str, float],
) -> dict[str, Any]:
    pauses = [one.pause_s for one in applied]
    copy, hashed, sent = (rates[name] * _GIB for name in ("memcpy_gib_s", "hash_gib_s", "loopback_gib_s"))
    touched = (
        total if mode == "elements" else changed
    )  # in every tensor something is another: all are verified and applied
    limit_s = total / copy + total / hashed + touched / hashed + touched / copy
    limit_s += changed / sent if transport.startswith("http") else 0.0
    return {
        "transport": transport,
        "bytes": total,
        "engines": engines,
        "mode": mode,
        "publish_to_serving_p50_s": round(_at(seconds, 50), 4),
        "publish_to_serving_p99_s": round(_at(seconds, 99), 4),
        "pause_p50_s": round(_at(pauses, 50), 4),
        "pause_p99_s": round(_at(pauses, 99), 4),
        "bytes_moved": sum(one.bytes_fetched for one in applied) // len(applied),
        "bytes_changed": changed,
        "bytes_applied": applied[-1].bytes_applied,
        "limit_s": round(limit_s, 4),
        "of_limit": round(limit_s / _at(seconds, 50), 3),
        "trainer_stall_s": round(_at(stalls, 50), 4),
        "checksum_failures": max(one.checksum_failures for one in applied),
    }


async def _late_join(load: Load, line: Line) -> dict[str, float]:
    """A further engine comes; what one of the engines needs for a whole version is what it is compared with."""
    line.model.change(range(TENSORS))
    _, applied = await line.round()
    label = f"policy@1.{line.number}"
    place, memory = Path(line.area.folder).parent, (TENSORS, 2 * line.model.elements)
    spec = PartSpec(
        "late", str(place), str(line.area.folder if load.transport == "held" else place / "late"), line.url, *memory
    )
    late = Part("engine", spec)
    try:
        await late.answer()
        joined = await late.apply(label)
    finally:
        late.stop()
    return {
        "late_join_s": round(joined.fetch_s + joined.pause_s, 4),
        "one_transfer_s": round(min(one.fetch_s + one.pause_s for one in applied), 4),
    }


@contextlib.asynccontextmanager
async def _line(load: Load) -> AsyncIterator[Line]:
    with contextlib.ExitStack() as parts:
        place = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="b4-", dir=_MEMORY)))
        area = SharedArea(place / "trainer")
        service = Part(
            "service", PartSpec("service", str(place), str(area.folder), keep_last=2 if load.transport == "http" else 1)
        )
        parts.callback(service.stop)
        url = msgspec.json.decode(await service.answer())["url"]
        engines, tensor_bytes = [], 2 * Model(load.size_bytes).elements
        for number in range(load.engines):
            own = area.folder if load.transport == "held" else place / f"host-{number}"
            engines.append(
                Part("engine", PartSpec(f"engine-{number}", str(place), str(own), url, TENSORS, tensor_bytes))
            )
            parts.callback(engines[-1].stop)
        for engine in engines:
            await engine.answer()
        async with aiohttp.ClientSession() as session:
            yield Line(area, url, session, engines, Model(load.size_bytes))


def _at(values: list[float], percent: int) -> float:
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]
