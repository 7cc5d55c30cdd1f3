"""Small records and tensors between ranks, in msgpack over the world's own groups.

Invariant: never pickle. Collective, or one sender and one receiver, as each function says.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.megatron.distributed import Parallel


class _Header(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    dtype: str


def from_stage(data: bytes | None, stage: int, parallel: Parallel) -> bytes:
    """What pipeline stage `stage` gives, on all stages; collective over the pipeline group. `data` is read there only."""
    if parallel.pp == 1:
        return b"" if data is None else data
    payload = torch.from_numpy(np.frombuffer(data or b"", np.uint8).copy()).to(parallel.device)
    size = torch.tensor([len(payload)], device=parallel.device)
    dist.broadcast(size, parallel.stage_rank(stage), group=parallel.pp_group)
    if stage != parallel.pp_rank:
        payload = torch.empty(int(size), dtype=torch.uint8, device=parallel.device)
    dist.broadcast(payload, parallel.stage_rank(stage), group=parallel.pp_group)
    return payload.cpu().numpy().tobytes()


def from_all(data: bytes) -> list[bytes]:
    """What each rank gives, in rank order, on all; collective over the world."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return [data]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded)
    return [part[: int(size)].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def send_tensors(named: Sequence[tuple[str, Tensor]], to: int, parallel: Parallel) -> None:
    """Counterpart of `receive_tensors` on rank `to`."""
    headers = [_Header(name, list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in named]
    data = msgspec.msgpack.encode(headers)
    dist.send(torch.tensor([len(data)], device=parallel.device), to)
    dist.send(torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(parallel.device), to)
    for _, one in named:
        dist.send(one.to(parallel.device).contiguous(), to)


def receive_tensors(source: int, parallel: Parallel) -> list[tuple[str, Tensor]]:
    """What rank `source` sends, on this rank's device."""
    size = torch.zeros(1, dtype=torch.int64, device=parallel.device)
    dist.recv(size, source)
    data = torch.empty(int(size), dtype=torch.uint8, device=parallel.device)
    dist.recv(data, source)
    found = []
    for header in msgspec.msgpack.decode(data.cpu().numpy().tobytes(), type=list[_Header]):
        one = torch.empty(header.shape, dtype=getattr(torch, header.dtype), device=parallel.device)
        dist.recv(one, source)
        found.append((header.name, one))
    return found
