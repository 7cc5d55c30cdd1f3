"""The stub's decode loop. Invariant: a token is made by the weights that are live in its step, and says so in its span.

All running requests get one token per step, as in a real engine; while generation is paused nobody gets any.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import stub_tokens

CAPACITY: Final = 1_000_000
"""Tokens of the pool that there is not."""


@dataclass(eq=False)
class Request:
    """One sequence in the making. `start`: tokens of its prompt."""

    task: str
    start: int
    wanted: int
    budget: int
    done: asyncio.Future[None]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    aborted: bool = False
    kv: str = ""
    """The weights that read the prompt, where another server did; a token of other weights over it is of neither."""

    def step(self, label: str, weights: str) -> None:
        weights = weights if self.kv in ("", weights) else f"{weights} over {self.kv}"
        position = self.start + len(self.tokens)
        self.tokens.append(stub_tokens.token(self.task, position, weights))
        self.logprobs.append(stub_tokens.logprob(self.task, position, weights))
        if self.spans and self.spans[-1]["version"] == label:
            self.spans[-1]["end"] += 1
        else:
            self.spans.append({"version": label, "start": len(self.tokens) - 1, "end": len(self.tokens)})
        if len(self.tokens) == min(self.wanted, self.budget) and not self.done.done():
            self.done.set_result(None)


class Journal:
    """Appends JSON lines; each is one write, so a killed stub leaves whole lines."""

    def __init__(self, path: str) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if path else -1

    def write(self, **values: Any) -> None:
        if self._handle >= 0:
            os.write(self._handle, orjson.dumps({"at": time.time(), **values}) + b"\n")


class Decoder:
    """Holds the weights' digest and the running requests."""

    def __init__(self, model: Path, label: str, step_s: float, journal: Journal) -> None:
        self._by_label: dict[str, str] = {}
        self._tensors = stub_tokens.tensor_digests(model)
        self._step_s = step_s
        self._journal = journal
        self._running: set[Request] = set()
        self._busy = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._live(label)

    def _live(self, label: str) -> None:
        self.label, self._weights = label, stub_tokens.weights_digest(self._tensors)
        self._by_label[label] = self._weights
        self._journal.write(kind="live", label=label, weights=self._weights)

    def weights_of(self, request: Request) -> str:
        """Those that made its (only) token."""
        return self._by_label[request.spans[0]["version"]]

    def load(self) -> dict[str, float]:
        """As /v1/loads names it; the pool is as large as anybody may want."""
        used = sum(one.start + len(one.tokens) for one in self._running)
        return {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": 0,
            "num_used_tokens": used,
            "max_total_num_tokens": CAPACITY,
            "token_usage": used / CAPACITY,
            "gen_throughput": len(self._running) / self._step_s if self._resumed.is_set() else 0.0,
        }

    def pause(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def update(self, folder: Path, label: str) -> None:
        self._tensors |= stub_tokens.tensor_digests(folder)
        self._live(label)

    def abort_all(self) -> None:
        """All that run end with what they have."""
        for request in self._running:
            if not request.done.done():
                request.aborted = True
                request.done.set_result(None)

    def rename(self, label: str) -> None:
        self._live(label)

    async def generate(self, request: Request) -> None:
        """Returns when the request has its tokens. Cancelled (its client is gone): it is forgotten."""
        self._running.add(request)
        self._busy.set()
        try:
            await request.done
        finally:
            self._running.discard(request)
        self._journal.write(
            kind="reply", task=request.task, start=request.start, tokens=request.tokens, spans=request.spans
        )

    async def run(self) -> None:
        """Decodes for ever; waits without a clock while nothing runs or generation is paused."""
        while True:
            if not self._running:
                self._busy.clear()
                await self._busy.wait()
            await self._resumed.wait()
            await asyncio.sleep(self._step_s)
            if self._resumed.is_set():
                for request in tuple(self._running):
                    if not request.done.done():
                        request.step(self.label, self._weights)
