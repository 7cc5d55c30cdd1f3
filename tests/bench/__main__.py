"""`python -m tests.bench B6 --size smoke|full [--record]`: runs a benchmark; its last line is one JSON object.

Size long is for B6 alone: a million samples, a quarter of an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

from tests.bench import host

BENCHES: Final = {
    "B1": "tests.bench.b1_tail_bubble",
    "B2": "tests.bench.b2_freshness",
    "B3": "tests.bench.chaos",
    "B4": "tests.bench.b4_weights",
    "B6": "tests.bench.bus_tax",
    "B7": "tests.bench.b7_throughput",
    "B8": "tests.bench.b8_trainer",
    "crowd": "tests.bench.crowd",
    "fleet": "tests.bench.fleet",
    "kernels": "tests.bench.kernels",
    "tail-slots": "tests.bench.tail_slots",
}
"""Each module has `async measure(size)`, which returns the fields that docs and tests name."""
RESULTS: Final = Path(__file__).with_name("results")


def run(name: str, size: str) -> dict[str, Any]:
    """One benchmark: its fields behind those that all have."""
    began = time.perf_counter()
    fields: dict[str, Any] = asyncio.run(importlib.import_module(BENCHES[name]).measure(size))
    head: dict[str, Any] = {"bench": name, "size": size, "host": host.describe(), "versions": host.versions()}
    return head | {"seconds": round(time.perf_counter() - began, 1)} | fields


def table(result: dict[str, Any]) -> str:
    """The fields for people: rows as columns, the rest as lines."""
    lines = [f"{name:>22}  {value}" for name, value in result.items() if name != "rows"]
    rows = result.get("rows") or []
    if rows:
        lines.append("  ".join(f"{name:>18}" for name in rows[0]))
        lines += ["  ".join(f"{value!s:>18}" for value in row.values()) for row in rows]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("bench", choices=[*BENCHES, "all"])
    parser.add_argument("--size", choices=["smoke", "flat", "full", "long"], default="full")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS}/Bn.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    for name in BENCHES if options.bench == "all" else [options.bench]:
        result = run(name, options.size)
        if options.record:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(table(result))
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
