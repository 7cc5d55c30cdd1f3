"""Objective kernels: log-probability and entropy of many tokens over a large vocabulary, forward and backward.

    plain     float32 logits of all tokens, log_softmax, gather: what a textbook does
    rows      logits in chunks of rows, recomputed in the backward pass by torch's checkpoint
    linear    the product's: algorithms/linear_logprobs.py

Each form runs in a process of its own, so that its peak memory is its own; `peak_mib` is above what the inputs and their
gradients take. A form whose logits do not fit is null. `limit_s` is four plain matrix products (two of the forward pass, one
of them again, and two of the backward: hidden and weight), the least that any form without kept logits needs.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from physarum.actors.trainer.algorithms.linear_logprobs import linear_logprobs_and_entropy
from physarum.actors.trainer.algorithms.logprobs import token_logprobs_and_entropy

FORMS: Final = ("plain", "rows", "linear")
CHUNK_ROWS: Final = 1024
_CHILD_S: Final = 900.0
_COPIES: Final = 4
"""Of float32 logits that the plain form holds at its peak: logits, log-softmax, and the gradients of both."""


@dataclass(frozen=True)
class Shape:
    """`tokens` rows of `hidden` values, `vocabulary` columns."""

    tokens: int
    vocabulary: int
    hidden: int
    dtype: str = "float32"


def shapes(size: str) -> list[Shape]:
    if torch.cuda.is_available():
        return [Shape(16_384, 151_936, 1024, "bfloat16"), Shape(4_096, 151_936, 1024, "bfloat16")]
    if size == "smoke":
        return [Shape(1_024, 32_000, 64)]
    return [Shape(2_048, 151_936, 128), Shape(16_384, 151_936, 128)]


async def measure(size: str) -> dict[str, Any]:
    """The rows of every form and shape."""
    rows = []
    for shape in shapes(size):
        limit_s = await _child("limit", shape)
        for form in FORMS:
            fits = form != "plain" or _COPIES * 4 * shape.tokens * shape.vocabulary < _memory_bytes()
            found = await _child(form, shape) if fits else {"seconds": None, "peak_mib": None}
            rows.append({"form": form, **asdict(shape), **found, "limit_s": limit_s["seconds"]})
    return {"rows": rows, "chunk_rows": CHUNK_ROWS}


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().available)


async def _child(form: str, shape: Shape) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.bench.kernels", form, json.dumps(asdict(shape))]
    child = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(_CHILD_S):
        output, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError(f"form {form} of {shape} ended with status {child.returncode}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def run_form(form: str, shape: Shape) -> dict[str, float]:
    """Seconds of the second of two passes, and the peak memory above the inputs and their gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, shape.dtype)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=random).to(device, dtype).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.hidden, generator=random).mul(0.05).to(device, dtype).requires_grad_()
    targets = torch.randint(0, shape.vocabulary, (shape.tokens,), generator=random).to(device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before = _peak_mib()
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        _pass(form, hidden, weight, targets)
        _synchronize()
        seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 3), "peak_mib": round(_peak_mib() - before, 1)}


def _pass(form: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if form == "limit":
        _products(hidden, weight)
        return
    logprobs = _LOGPROBS[form](hidden, weight, targets)
    (logprobs.sum() / len(targets)).backward()


@torch.no_grad()
def _products(hidden: Tensor, weight: Tensor) -> None:
    for rows in hidden.split(CHUNK_ROWS):
        for _ in range(2):
            logits = rows @ weight.T
        logits @ weight
        logits.T @ rows


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    def piece(hidden: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs_and_entropy(hidden @ weight.T, targets, 1.0)[0]

    pieces = zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True)
    return torch.cat([checkpoint(piece, one, target, use_reentrant=False) for one, target in pieces])


def _linear(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_logprobs_and_entropy(hidden, weight, targets, 1.0, weight.size(0), chunk_rows=CHUNK_ROWS)[0]


_LOGPROBS: Final = {"plain": _plain, "rows": _rows, "linear": _linear}


def _peak_mib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / (1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(run_form(sys.argv[1], Shape(**json.loads(sys.argv[2])))))
