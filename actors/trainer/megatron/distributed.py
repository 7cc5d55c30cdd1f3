"""Process groups of one rank.

Invariant: one world per process; `initialize` and `destroy` are paired, and after `destroy` another world may start.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from physarum.actors.trainer.errors import UnsupportedParallelism, WorldStartError


@dataclass(frozen=True)
class Parallel:
    """This rank's place. `dp_group` also spans context-parallel ranks; `control` is a gloo group on any device."""

    rank: int
    ranks: int
    tp_rank: int
    tp: int
    dp_rank: int
    dp: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    device: torch.device


def check_parallelism(ranks: int, tp: int, pp: int, cp: int) -> None:
    """Refuse what this world cannot run, before any process starts. Raises UnsupportedParallelism."""
    if pp != 1 or cp != 1:
        raise UnsupportedParallelism(
            f"pp={pp}, cp={cp}: only 1 is available; use tensor or data parallel ranks instead"
        )
    if min(ranks, tp) < 1 or ranks % tp:
        raise UnsupportedParallelism(
            f"{ranks} ranks do not divide into tensor-parallel groups of {tp}; make ranks a multiple"
        )
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise UnsupportedParallelism(
            f"{ranks} ranks but {torch.cuda.device_count()} visible CUDA devices; expected a device for each rank"
        )


def initialize(store: dist.Store, rank: int, ranks: int, tp: int, timeout_s: float, seed: int) -> Parallel:
    """Join the world through `store`; every collective fails after `timeout_s`. Raises WorldStartError."""
    if dist.is_initialized():
        raise WorldStartError(
            "this process already belongs to a process group; expected none: close the other world first"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, distributed_timeout_minutes=timeout_s / 60, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return Parallel(
        rank=rank,
        ranks=ranks,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp=tp,
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        dp=ranks // tp,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        device=device,
    )


def destroy() -> None:
    """Leave the world. Safe to call after a failed `initialize`."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
