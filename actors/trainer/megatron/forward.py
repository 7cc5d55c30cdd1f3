"""One microbatch through the model: packed tokens in, log-probabilities of chosen tokens out.

Invariant: logits are computed only for the rows asked for (trained response tokens), so a masked position can poison
neither value nor gradient, and at most `LOGITS_CHUNK_BYTES` of logits exist at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from physarum.actors.trainer.algorithms.logprobs import (
    token_logprobs_and_entropy,
    vocab_parallel_logprobs_and_entropy,
)
from physarum.actors.trainer.batch import TrainSequence
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.layout import PackedLayout, pack_layout
from physarum.actors.trainer.megatron.model import Model

LOGITS_CHUNK_BYTES = 2 << 30
"""Float32 logits kept at once; beyond it rows are processed in chunks that are recomputed in the backward pass."""


@dataclass(frozen=True)
class MicrobatchTensors:
    """T packed tokens and the N response tokens whose log-probabilities are wanted, all on the rank's device."""

    tokens: Tensor
    """[1, T] int64."""
    layout: PackedLayout
    rows: Tensor
    """[N] index in the pack of the position whose logits predict the token (the one before it)."""
    targets: Tensor
    """[N] the token ids."""
    engine_logprobs: Tensor
    """[N] float32."""
    advantages: Tensor
    """[N] float32."""
    weights: Tensor
    """[N] float32: 1 / denominator, see algorithms/reduction.py."""


def microbatch_tensors(
    sequences: Sequence[TrainSequence], weights: Sequence[float], align: int, device: torch.device, every: bool = False
) -> MicrobatchTensors:
    """Tensors of sequences packed in the order given (longest first).

    Rows are the trained tokens, or with `every` all response tokens. The pack is padded to a multiple of `align` by one
    more segment (sequence parallelism); an empty microbatch is padding only.
    """
    lengths = [sequence.length for sequence in sequences]
    total = sum(lengths)
    padding = max(-total % align, 0 if total else align)
    parts: dict[str, list[Any]] = {"rows": [], "targets": [], "engine": [], "advantages": [], "weights": []}
    start = 0
    for sequence, weight in zip(sequences, weights, strict=True):
        chosen = np.arange(sequence.response_len) if every else np.flatnonzero(sequence.loss_mask)
        parts["rows"].append(chosen + (start + sequence.prompt_len - 1))
        parts["targets"].append(sequence.token_ids[sequence.prompt_len :][chosen])
        parts["engine"].append(sequence.engine_logprobs[chosen])
        parts["advantages"].append(sequence.advantages()[chosen])
        parts["weights"].append(np.full(len(chosen), weight))
        start += sequence.length
    ids = [sequence.token_ids for sequence in sequences] + [np.zeros(padding, np.int32)]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        joined = np.concatenate(parts[name]) if parts[name] else np.zeros(0)
        return torch.from_numpy(joined).to(device=device, dtype=dtype)

    return MicrobatchTensors(
        tokens=torch.from_numpy(np.concatenate(ids)).to(device=device, dtype=torch.int64)[None],
        layout=pack_layout(lengths + [padding] * bool(padding), device),
        rows=column("rows", torch.int64),
        targets=column("targets", torch.int64),
        engine_logprobs=column("engine", torch.float32),
        advantages=column("advantages", torch.float32),
        weights=column("weights", torch.float32),
    )


def row_logprobs(
    ddp: torch.nn.Module, model: Model, microbatch: MicrobatchTensors, temperature: float, parallel: Parallel
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every row, [N] each, float32; a collective over tensor-parallel ranks.

    `ddp` is the module to call (Megatron's schedule hands it in), `model` what it wraps.
    """
    model.module.rotary_pos_emb.positions = microbatch.layout.positions

    def rows_of(hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_unused: Any) -> Any:
        weight = output_layer.weight if output_weight is None else output_weight
        return _rows_to_logprobs(hidden_states, weight, model, microbatch, temperature, parallel)

    logprobs, entropy = ddp(
        input_ids=microbatch.tokens,
        position_ids=microbatch.layout.positions[None],
        attention_mask=None,
        packed_seq_params=microbatch.layout,
        output_processor=rows_of,
    )
    return logprobs, entropy


def _rows_to_logprobs(
    hidden_states: Tensor,
    weight: Tensor,
    model: Model,
    microbatch: MicrobatchTensors,
    temperature: float,
    parallel: Parallel,
) -> tuple[Tensor, Tensor]:
    """`hidden_states` [T, 1, H] (T / tp under sequence parallelism), `weight` [V / tp, H]."""
    sequence_parallel = model.bridge.config.sequence_parallel
    hidden = hidden_states.squeeze(1)
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    hidden = hidden.index_select(0, microbatch.rows)

    def logprobs(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            input=hidden,
            weight=weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=parallel.tp > 1 and not sequence_parallel,
            sequence_parallel=False,
            tp_group=parallel.tp_group,
        )
        if parallel.tp > 1:
            return vocab_parallel_logprobs_and_entropy(
                logits, targets, temperature, model.vocab_size, parallel.tp_group
            )
        return token_logprobs_and_entropy(logits, targets, temperature, model.vocab_size)

    rows = max(1, LOGITS_CHUNK_BYTES // (4 * weight.size(0)))
    if len(hidden) <= rows:
        return logprobs(hidden, microbatch.targets)
    pieces = [
        checkpoint(logprobs, piece, targets, use_reentrant=False)
        for piece, targets in zip(hidden.split(rows), microbatch.targets.split(rows), strict=True)
    ]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])
