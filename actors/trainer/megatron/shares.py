"""Which rank brings which parameter into a version, so that none holds more than one whole at a time and all work alike.

Invariant: a parameter's shards are put together among the ranks of one replica only, and one of those has it then. Which
replica and which of its ranks goes round with the parameter's place in export order, so that the work is spread over
data-, context- and tensor-parallel ranks. Collective: all ranks go through all parameters in the same order.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.exporting import Exported, whole_parameter
from physarum.actors.trainer.megatron.model import Model


def holders(which: Exported, index: int, parallel: Parallel) -> range:
    """The ranks of the replica that brings the `index`-th parameter: together they hold it once."""
    size, period = _cut(which, parallel)
    replica = index % (parallel.stage_ranks // period)
    start = which.stage * parallel.stage_ranks + replica * period + which.expert_rank * size
    return range(start, start + size)


def writer(which: Exported, index: int, parallel: Parallel) -> int:
    """The rank that brings it."""
    size, period = _cut(which, parallel)
    return holders(which, index, parallel)[index // (parallel.stage_ranks // period) % size]


def _cut(which: Exported, parallel: Parallel) -> tuple[int, int]:
    """(Ranks that hold a part of it, ranks that together hold all parameters of its kind once)."""
    if which.is_expert:
        return parallel.etp, parallel.etp * parallel.ep
    return parallel.tp, parallel.tp


def own_share(
    model: Model,
    exported: Sequence[Exported],
    parallel: Parallel,
    wanted: Callable[[int], bool] = lambda index: True,
) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
    """(Place in export order, Hugging Face tensors) of each `wanted` parameter that this rank brings, on its device, perhaps
    its very memory. Read each before the next. Collective: `wanted` says the same on all ranks."""
    for index, which in enumerate(exported):
        if not wanted(index) or parallel.rank not in holders(which, index, parallel):
            continue
        named = whole_parameter(model, which, parallel)
        if writer(which, index, parallel) == parallel.rank:
            yield index, named
