"""The routers of a model with experts, made to take recorded experts token by token, and to report those they took.

Invariant: what a token is told to take comes with its microbatch (PackedLayout.experts), so layers that run a second time
for the backward pass (activation recomputation) take the same experts, whichever microbatch ran in between. Only the choice
is replayed: the weights of the chosen experts come from the live router and carry its gradient.

A rank's routers see this rank's part of a pack: of a context-parallel shard, and under sequence parallelism the tensor-
parallel rank's slice of it. Experts of all parts of the world are numbered alike, so nothing here depends on `ep`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig

from physarum.actors.trainer.batch import Experts, TrainSequence
from physarum.actors.trainer.errors import UnsupportedModel, UnsupportedParallelism
from physarum.actors.trainer.megatron.context import Indices
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.fit import experts_field
from physarum.actors.trainer.megatron.layout import PackedLayout


class TokenReplay(RouterReplay):
    """Megatron's replay of a whole layer, made to leave tokens without a record to the router."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the experts of each token, [T, top-k] each; `target_topk_idx` has -1 where nothing is recorded."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.target_topk_idx is not None:
            recorded = self.target_topk_idx.long()
            chosen = torch.where(recorded >= 0, recorded, chosen)
            values = scores.gather(1, chosen)
        if self.router_replay_action is RouterReplayAction.RECORD:
            self.record_indices(chosen)
        return values, chosen


class Routing:
    """The routers of this rank's stage. Of the whole model: `layers` with experts, `experts` in each, `top_k` for a token."""

    def __init__(self, module: torch.nn.Module, config: TransformerConfig, parallel: Parallel) -> None:
        self.layers, self.top_k, self.experts = sum(moe_layers(config)), config.moe_router_topk, config.num_moe_experts
        self._routers: dict[int, TokenReplay] = {}
        self._parts = parallel.tp if config.sequence_parallel else 1
        self._part = parallel.tp_rank if config.sequence_parallel else 0
        self._device = parallel.device
        for layer in module.decoder.layers:  # type: ignore[union-attr]
            if isinstance(layer.mlp, MoELayer):
                self._adopt(layer, sum(moe_layers(config)[: layer.layer_number - 1]))
        RouterReplay.clear_global_router_replay_instances()  # Megatron's list would outlive this world

    def _adopt(self, layer: Any, index: int) -> None:
        replay = TokenReplay()
        layer.mlp.router.router_replay = self._routers[index] = replay

        def tell(_layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            layout: PackedLayout = kwargs["packed_seq_params"]
            replay.target_topk_idx = None if layout.experts is None else layout.experts[index]

        layer.register_forward_pre_hook(tell, with_kwargs=True)

    def told(self, sequences: Sequence[TrainSequence], origin: Indices) -> dict[int, Tensor] | None:
        """For each layer of this stage int16 [t, top-k] of the tokens that this rank's routers see, -1 where nothing is
        recorded; None where no sequence has a record.

        `origin` [T / cp]: place of this rank's tokens in `sequences`, one after another; -1 for padding.
        """
        if all(one.routed_experts is None for one in sequences):
            return None
        everything = np.concatenate([self._whole(one) for one in sequences] + [self._nothing(1)])
        own = torch.from_numpy(everything[self.seen(origin)]).to(self._device)
        return {index: own[:, index] for index in self._routers}

    def seen(self, origin: Indices) -> Indices:
        """The part of a rank's tokens that its routers see."""
        return np.split(origin, self._parts)[self._part]

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Callable[[], dict[int, Tensor]]]:
        """Gives a function that says what each router of this stage took in its last pass, [t, top-k]."""
        for replay in self._routers.values():
            replay.set_router_replay_action(RouterReplayAction.RECORD)
        try:
            yield self._last
        finally:
            for replay in self._routers.values():
                replay.clear_router_replay_action()
                replay.clear_indices()

    def _last(self) -> dict[int, Tensor]:
        found = {index: replay.get_recorded_indices() for index, replay in self._routers.items()}
        return {index: chosen for index, chosen in found.items() if chosen is not None}

    def _whole(self, sequence: TrainSequence) -> Experts:
        """int16 [T, layers, top-k], the last token's row added."""
        if sequence.routed_experts is None:
            return self._nothing(sequence.length)
        return np.concatenate([signed(sequence.routed_experts), self._nothing(1)])

    def _nothing(self, rows: int) -> Experts:
        return np.full((rows, self.layers, self.top_k), -1, np.int16)


def signed(experts: Experts) -> Experts:
    """int16, -1 where nothing is recorded."""
    if experts.dtype != np.uint8:
        return experts
    return np.where(experts == np.iinfo(np.uint8).max, -1, experts.astype(np.int16)).astype(np.int16)


def moe_layers(config: TransformerConfig) -> list[int]:
    """1 for each layer of the whole model that has experts, else 0."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(config.num_layers)]
    return [int(one) for one in frequency]


def check_replay(config: PretrainedConfig, routing: str, pp: int, overrides: Mapping[str, Any]) -> None:
    """`config` is the folder's config.json, `overrides` the `megatron:` section. Raises UnsupportedModel where the model has
    no experts, UnsupportedParallelism where a layer would be told of another microbatch."""
    if routing == "off":
        return
    if experts_field(config) is None:
        raise UnsupportedModel(
            f"trainer.algorithm.replay.routing: {routing} with a {config.model_type} model, which has no experts; expected"
            " `off`, or a model with experts"
        )
    if overrides.get("moe_router_fusion") or overrides.get("cuda_graph_impl", "none") != "none":
        raise UnsupportedModel(
            f"trainer.algorithm.replay.routing: {routing} with megatron.moe_router_fusion or megatron.cuda_graph_impl, whose"
            " routers ask nobody; expected neither: leave them out, or set replay.routing to off"
        )
    alone = overrides.get("recompute_granularity") == "selective" and "moe" in (
        overrides.get("recompute_modules") or ()
    )
    if pp > 1 and alone:
        raise UnsupportedParallelism(
            f"trainer.algorithm.replay.routing: {routing} with pp={pp} and megatron.recompute_modules of `moe`: the experts run"
            " again without their layer, when another microbatch has passed it; expected recompute_granularity `full`, or pp 1"
        )
