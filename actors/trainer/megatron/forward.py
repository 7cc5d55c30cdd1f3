"""One microbatch through this rank's stage of the model: on the last stage log-probabilities of chosen tokens come out.

Invariant: logits are computed only for the rows asked for (trained response tokens), so a masked position can poison
neither value nor gradient, and at most `LOGITS_CHUNK_BYTES` of logits exist at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from physarum.actors.trainer.algorithms.linear_logprobs import linear_logprobs_and_entropy
from physarum.actors.trainer.megatron.distributed import Parallel
from physarum.actors.trainer.megatron.microbatch import MicrobatchTensors
from physarum.actors.trainer.megatron.model import Model

LOGITS_CHUNK_BYTES = 512 << 20
"""Float32 logits kept at once: rows are processed in chunks, whose logits are computed once more in the backward pass."""


def row_logprobs(
    ddp: torch.nn.Module,
    model: Model,
    microbatch: MicrobatchTensors,
    temperature: float,
    parallel: Parallel,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every row, [N] each, float32; a collective over tensor and context-parallel ranks.

    `ddp` is the module to call (Megatron's schedule hands it in), `model` what it wraps. Before the last stage: the
    hidden states for the next stage, and no entropy. `entropy_gradient`: the entropy is differentiable, too.
    """

    def rows_of(hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_unused: Any) -> Any:
        weight = output_layer.weight if output_weight is None else output_weight
        return _rows_to_logprobs(hidden_states, weight, model, microbatch, temperature, parallel, entropy_gradient)

    output = call_model(ddp, model, microbatch, rows_of)
    if not parallel.is_last_stage:
        return output, output.new_zeros(0)
    if microbatch.shared is None:
        return output[0], output[1]
    both = microbatch.shared.whole(torch.stack(output, 1))
    return both[:, 0], both[:, 1]


def call_model(ddp: torch.nn.Module, model: Model, microbatch: MicrobatchTensors, rows_of: Callable[..., Any]) -> Any:
    """What `rows_of` makes of the last hidden states, where GPTModel computes its loss; hidden states of earlier stages."""
    return ddp(
        input_ids=microbatch.tokens,
        position_ids=microbatch.layout.positions[None],
        attention_mask=None,
        packed_seq_params=microbatch.layout,
        output_processor=rows_of,
    )


def _rows_to_logprobs(
    hidden_states: Tensor,
    weight: Tensor,
    model: Model,
    microbatch: MicrobatchTensors,
    temperature: float,
    parallel: Parallel,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Of this rank's rows. `hidden_states` [T / cp, 1, H] (1 / tp of it under sequence parallelism), `weight` [V / tp, H]."""
    sequence_parallel = model.bridge.config.sequence_parallel
    hidden = hidden_states.squeeze(1)
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    hidden = hidden.index_select(0, microbatch.rows)

    return linear_logprobs_and_entropy(
        hidden,
        weight,
        microbatch.targets,
        temperature,
        model.vocab_size,
        parallel.tp_group if parallel.tp > 1 else None,
        chunk_rows=max(1, LOGITS_CHUNK_BYTES // (4 * weight.size(0))),
        entropy_gradient=entropy_gradient,
        reduce_hidden_gradient=not sequence_parallel,
        nucleus=microbatch.kept,
    )
