"""The shape of a world and the place of one rank in it: process groups in every direction.

Invariant: one world per process; `initialize` and `destroy` are paired, and after `destroy` another world may start.
Ranks are numbered tensor-parallel first, then context, data and pipeline (Megatron's order). Experts divide the ranks
of a pipeline stage anew: expert-tensor-parallel first, then experts, then replicas.
"""

import datetime
import gc
import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from physarum.actors.trainer.errors import UnsupportedParallelism, WorldStartError
from physarum.actors.trainer.megatron import flash
from physarum.actors.trainer.megatron.context import ContextShard
from physarum.actors.trainer.world_config import WorldConfig


class Shape(NamedTuple):
    """How many ranks there are and into how many parts each direction cuts the model."""

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, config: WorldConfig) -> Self:
        """`etp` is `tp` unless it is set."""
        return cls(
            config.ranks, config.tp, config.pp, config.cp, config.ep, config.tp if config.etp is None else config.etp
        )


@dataclass(frozen=True)
class Parallel:
    """This rank's place: its rank in each direction, the direction's size, and the group of the ranks that differ in it.

    `dp` counts the ranks that get different sequences; ranks of one context-parallel group get the same ones.
    """

    rank: int
    ranks: int
    tp_rank: int
    tp: int
    cp_rank: int
    cp: int
    dp_rank: int
    dp: int
    pp_rank: int
    pp: int
    ep: int
    etp: int
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    device: torch.device

    @property
    def shard(self) -> ContextShard | None:
        """This rank's part of every pack; None where it has all of it."""
        return ContextShard(self.cp_rank, self.cp, self.cp_group) if self.cp > 1 else None

    @property
    def is_last_stage(self) -> bool:
        """Whether the model's output is computed here."""
        return self.pp_rank == self.pp - 1

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage; stage s begins at rank s * stage_ranks."""
        return self.ranks // self.pp

    def stage_rank(self, stage: int) -> int:
        """The rank at this rank's place in pipeline stage `stage`."""
        return self.rank % self.stage_ranks + stage * self.stage_ranks

    @property
    def first_replica(self) -> int:
        """The first rank that holds the same weights, experts included."""
        start, period = self.pp_rank * self.stage_ranks, math.lcm(self.tp, self.etp * self.ep)
        return start + (self.rank - start) % period


def check_parallelism(shape: Shape) -> None:
    """Refuse what this world cannot run, before any process starts. Raises UnsupportedParallelism."""
    ranks, tp, pp, cp, ep, etp = shape
    if min(shape) < 1:
        raise UnsupportedParallelism(f"{named(shape)}; expected 1 or more of each")
    if ranks % (tp * pp * cp):
        raise UnsupportedParallelism(
            f"{ranks} ranks do not divide into copies of tp {tp} * pp {pp} * cp {cp} = {tp * pp * cp}; make ranks a multiple"
        )
    if etp not in (1, tp):
        raise UnsupportedParallelism(f"etp={etp} with tp={tp}; expected 1 or {tp}: leave etp out to take tp")
    if (ranks // pp) % (etp * ep):
        raise UnsupportedParallelism(
            f"{ranks // pp} ranks of a pipeline stage do not divide into etp {etp} * ep {ep} = {etp * ep}; "
            "make ranks a multiple or lower ep"
        )
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise UnsupportedParallelism(
            f"{ranks} ranks but {torch.cuda.device_count()} visible CUDA devices; expected a device for each rank"
        )


def named(shape: Shape) -> str:
    """For messages."""
    return ", ".join(f"{name}={size}" for name, size in shape._asdict().items())


def initialize(store: dist.Store, rank: int, shape: Shape, timeout_s: float, seed: int) -> Parallel:
    """Join the world through `store`; every collective fails after `timeout_s`. Raises WorldStartError."""
    if dist.is_initialized():
        raise WorldStartError(
            "this process already belongs to a process group; expected none: close the other world first"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        flash.without_plans()
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=shape.ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        context_parallel_size=shape.cp,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=shape.etp,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    return _place(rank, shape, device)


def _place(rank: int, shape: Shape, device: torch.device) -> Parallel:
    return Parallel(
        rank=rank,
        ranks=shape.ranks,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp=shape.tp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp=shape.cp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp=shape.ranks // (shape.tp * shape.pp * shape.cp),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp=shape.pp,
        ep=shape.ep,
        etp=shape.etp,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        device=device,
    )


def destroy() -> None:
    """Leave the world. Safe to call after a failed `initialize`.

    Megatron's objects refer to each other in circles, and to the groups, each of which keeps some threads awake and
    descriptors open: they are collected now, not at some time.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
