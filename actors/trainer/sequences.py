"""From executions and their plan to what the torch side consumes: masks and advantages applied, nothing else changed."""

from __future__ import annotations

import numpy as np

from physarum.actors.trainer.batch import TrainSequence
from physarum.bus.ledger import Planned
from physarum.bus.records import Execution, Sample


def train_sequences(executions: list[Execution], plan: list[Planned]) -> list[TrainSequence]:
    """One sequence per sample that has a token left to train; `execution` is the index of its execution in the plan."""
    sequences: list[TrainSequence] = []
    for index, (execution, planned) in enumerate(zip(executions, plan, strict=True)):
        for number, sample in enumerate(execution.samples):
            mask = _mask(sample, number, planned)
            if mask.any():
                sequences.append(_sequence(sample, mask, planned.advantage, index))
    return sequences


def _mask(sample: Sample, number: int, planned: Planned) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = sample.loss_mask.copy() if sample.trainable else np.zeros(sample.response_len, np.bool_)
    for gone in planned.masks:
        if gone.sample == number:
            mask[gone.start : gone.end] = False
    return mask


def _sequence(
    sample: Sample, mask: np.ndarray[tuple[int], np.dtype[np.bool_]], advantage: float, execution: int
) -> TrainSequence:
    return TrainSequence(
        token_ids=np.asarray(sample.token_ids, np.int32),
        prompt_len=sample.prompt_len,
        loss_mask=mask,
        engine_logprobs=np.asarray(sample.logprobs, np.float32),
        advantage=advantage,
        execution=execution,
    )
