"""Rows and episodes of the bus tax benchmark: nothing is computed, so what is measured is the bus and the records."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from physarum.agents.protocols import Client
from physarum.bus.records import Sample, Task
from physarum.bus.version import Span

PROMPT = 16
BYTES_PER_TOKEN = 8
"""An id (int32) and a log-probability (float32); the mask is a run length."""
GROUP = 8
VERSION = "policy@1.0"


class Rows:
    """`size` rows of nothing."""

    def __init__(self, seed: int, *, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return {"prompt": "bus", "label": "tax"}


@functools.cache
def _arrays(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    ids = random.integers(0, 1 << 17, PROMPT + tokens, dtype=np.int32)
    return ids, np.ones(tokens, np.bool_), -random.random(tokens, dtype=np.float32)


def sample(size_bytes: int, reward: float | None = None) -> Sample:
    """A trajectory of about `size_bytes` on the wire."""
    tokens = size_bytes // BYTES_PER_TOKEN
    ids, mask, logprobs = _arrays(tokens)
    return Sample(
        token_ids=ids,
        prompt_len=PROMPT,
        loss_mask=mask,
        logprobs=logprobs,
        spans=[Span(VERSION, 0, tokens)],
        reward=reward,
    )


async def generate(task: Task, client: Client, *, size_bytes: int) -> list[Sample]:
    """Hook `rollout.generate`: the sample is there at once."""
    return [sample(size_bytes, float(task.member % 2))]
