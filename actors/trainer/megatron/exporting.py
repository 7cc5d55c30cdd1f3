"""The model's weights (parameters and stored buffers) on rank 0, one at a time, from whichever rank holds them.

Invariant: all ranks go through the same list; at most one parameter is ever whole anywhere. A parameter is put together
by the first ranks of its pipeline stage (of an expert: those of its expert-parallel rank), which send it to rank 0.
"""

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.exchange import from_stage, receive_tensors, send_tensors
from physarum.actors.trainer.megatron.model import Model, weights

_EXPERT = ".experts.local_experts."


class Exported(msgspec.Struct, frozen=True):
    """One parameter: its name on the ranks that hold it, and which those are."""

    name: str
    stage: int
    expert_rank: int

    @property
    def is_expert(self) -> bool:
        return _EXPERT in self.name

    def holders(self, parallel: Parallel) -> range:
        """Ranks that together hold it once; the first converts it."""
        size = parallel.etp if self.is_expert else parallel.tp
        start = self.stage * parallel.stage_ranks + self.expert_rank * size
        return range(start, start + size)


def exported_parameters(model: Model, parallel: Parallel) -> list[Exported]:
    """All parameters in export order, the same on every rank; collective over the pipeline group.

    The output layer of a model with tied embeddings is a copy on the last of several stages: the first stage has it too.
    """
    tied = model.module.share_embeddings_and_output_weights
    own = [
        Exported(name, parallel.pp_rank, expert_rank)
        for name in weights(model.module)
        if not (tied and name.startswith("output_layer."))
        for expert_rank in range(parallel.ep if _EXPERT in name else 1)
    ]
    mine = msgspec.msgpack.encode(own)
    stages = [from_stage(mine, stage, parallel) for stage in range(parallel.pp)]
    return [one for data in stages for one in msgspec.msgpack.decode(data, type=list[Exported])]


def export_parameter(
    model: Model, which: Exported, parallel: Parallel, on_device: bool = False
) -> list[tuple[str, Tensor]]:
    """Rank 0: the Hugging Face tensors of one parameter, contiguous host copies; nothing elsewhere.

    `on_device`: where the parameter is, perhaps its very memory, to be read before the next step.

    Collective over the parameter's holders and rank 0.
    """
    holders = which.holders(parallel)
    source = holders[0]
    named: list[tuple[str, Tensor]] = []
    if parallel.rank in holders:
        named = whole_parameter(model, which, parallel)
    if source != 0 and parallel.rank == source:
        send_tensors(named, 0, parallel)
    if parallel.rank != 0:
        return []
    if source != 0:
        named = receive_tensors(source, parallel)
    if on_device:
        return named
    return [(name, tensor.to("cpu", copy=True).contiguous()) for name, tensor in named]


def whole_parameter(model: Model, which: Exported, parallel: Parallel) -> list[tuple[str, Tensor]]:
    """Its Hugging Face tensors, put together among the ranks of this replica that hold a part; collective over those."""
    owner, _, leaf = which.name.rpartition(".")
    parameter: Tensor = getattr(model.module.get_submodule(owner), leaf)
    table_name = model.table_names[which.name]
    whole = parameter.detach()
    size, group = (parallel.etp, parallel.etp_group) if which.is_expert else (parallel.tp, parallel.tp_group)
    if size > 1 and getattr(parameter, "tensor_model_parallel", False):
        shards = [torch.empty_like(whole) for _ in range(size)]
        dist.all_gather(shards, whole.contiguous(), group=group)
        whole = model.bridge._weight_merge_across_tp(table_name, shards, parameter)
    names, tensors = model.bridge._weight_to_hf_format(table_name, whole)
    return list(zip(names, tensors, strict=True))
