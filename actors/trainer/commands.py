"""What rank 0 tells the other ranks, and how they answer.

Invariant: msgpack in a byte tensor over a gloo group, never pickle; an idle rank waits for the next command without a
deadline (its parent's death ends it), everything else has one.
"""

import datetime
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

_IDLE = datetime.timedelta(days=3650)
"""How long a rank may wait for its next command: for ever, as gloo counts."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """One batch, which leaves version `number`; `sequences` as encode_sequences gives them."""

    sequences: bytes
    lr: float | None
    number: int


class Logprobs(msgspec.Struct, frozen=True, tag=True):
    """Log-probabilities of the response tokens."""

    sequences: bytes


class Export(msgspec.Struct, frozen=True, tag=True):
    """One parameter by its index in export order."""

    index: int


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    """All parameters into a file of this host, each rank its share; `old_bytes` of it are memory that is there. `quantised`: in
    the form of this quantization_config."""

    path: str
    old_bytes: int
    quantised: dict[str, Any] | None = None


class Save(msgspec.Struct, frozen=True, tag=True):
    """Training state to a folder, or the policy's weights alone."""

    folder: str
    weights_only: bool = False


class Load(msgspec.Struct, frozen=True, tag=True):
    """Training state from a folder, or the policy's weights alone."""

    folder: str
    weights_only: bool = False


class LoadOptimizer(msgspec.Struct, frozen=True, tag=True):
    """The policy's optimizer from a torch_dist folder; `steps`: that it has made, where the folder does not tell."""

    folder: str
    steps: int | None


class Close(msgspec.Struct, frozen=True, tag=True):
    """Leave the world."""


Command = Step | Logprobs | Export | Snapshot | Save | Load | LoadOptimizer | Close


class Channel:
    """Commands from rank 0 to all, outcomes from all to all. Made by every rank at the same time (collective)."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)
        self._ranks = dist.get_world_size()

    def send(self, command: Command) -> None:
        """Rank 0: hand `command` to all ranks. Raises RuntimeError where one does not take it in time."""
        data = np.frombuffer(msgspec.msgpack.encode(command), np.uint8)
        self._broadcast(torch.tensor([data.size]), self._deadline)
        self._broadcast(torch.from_numpy(data.copy()), self._deadline)

    def receive(self) -> Command:
        """Other ranks: wait for the next command."""
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size, _IDLE)
        data = torch.zeros(int(size), dtype=torch.uint8)
        self._broadcast(data, self._deadline)
        return msgspec.msgpack.decode(data.numpy().tobytes(), type=Command)

    def outcomes(self, failure: str, waits: bool = False) -> list[str]:
        """Every rank's failure text ("" where it did the command), in rank order; collective.

        With `waits` without a deadline: a rank that is done early waits for the slower ones as long as they need.
        """
        deadline = _IDLE if waits else self._deadline
        text = np.frombuffer(failure.encode(), np.uint8).copy()
        sizes = self._gather(torch.tensor([text.size]), deadline)
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [""] * self._ranks
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: text.size] = torch.from_numpy(text)
        texts = self._gather(padded, deadline)
        return [bytes(text[: int(size)].tolist()).decode() for text, size in zip(texts, sizes, strict=True)]

    def _broadcast(self, tensor: torch.Tensor, deadline: datetime.timedelta) -> None:
        _wait(dist.broadcast(tensor, 0, group=self._group, async_op=True), deadline)

    def _gather(self, tensor: torch.Tensor, deadline: datetime.timedelta) -> list[torch.Tensor]:
        parts = [torch.zeros_like(tensor) for _ in range(self._ranks)]
        _wait(dist.all_gather(parts, tensor, group=self._group, async_op=True), deadline)
        return parts


def _wait(work: Any, deadline: datetime.timedelta) -> None:
    work.wait(deadline)
