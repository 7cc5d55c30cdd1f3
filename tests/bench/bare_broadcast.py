"""The wire alone: `python -m tests.bench.bare_broadcast BYTES` prints the seconds of one torch.distributed broadcast from the
first device to the second, the best of five."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
    found = []
    for _ in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        dist.broadcast(buffer, src=0)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    if rank == 0:
        print(min(found[2:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    mp.spawn(_rank, (int(sys.argv[1]), 29611), nprocs=2)
