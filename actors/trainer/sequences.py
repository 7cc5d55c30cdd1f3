"""From executions and their plan to what the torch side consumes: masks and advantages applied, nothing else changed."""

from __future__ import annotations

import msgspec
import numpy as np

from physarum.actors.trainer.batch import TrainSequence
from physarum.bus.ledger import Planned
from physarum.bus.records import Execution, Sample
from physarum.bus.version import Fork, Version, age


def train_sequences(
    executions: list[Execution],
    plan: list[Planned],
    at_number: int = 0,
    forks: tuple[Fork, ...] = (),
    metadata: tuple[str, ...] = (),
) -> list[TrainSequence]:
    """One sequence per sample that has a token left to train, with the age of each token at the step that trains it.

    `execution` and `group` are indices of the execution and its group in the plan; `metadata`: keys of the tasks' metadata
    to take along, null where a task has none of that name.
    """
    sequences: list[TrainSequence] = []
    groups: dict[str, int] = {}
    for index, (execution, planned) in enumerate(zip(executions, plan, strict=True)):
        group = groups.setdefault(planned.group, len(groups))
        declared = {key: execution.task.metadata.get(key) for key in metadata}
        for number, sample in enumerate(execution.samples):
            mask = _mask(sample, number, planned)
            if mask.any():
                ages = _ages(sample, at_number, forks)
                one = _sequence(sample, mask, planned.advantage, index, group, ages)
                sequences.append(msgspec.structs.replace(one, metadata=declared) if declared else one)
    return sequences


def _ages(sample: Sample, at_number: int, forks: tuple[Fork, ...]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """[R]; 0 where no version is known (demonstrations)."""
    ages = np.zeros(sample.response_len, np.float32)
    for span in sample.spans:
        ages[span.start : span.end] = age(Version.parse(span.version), at_number, forks)
    return ages


def _mask(sample: Sample, number: int, planned: Planned) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = sample.loss_mask.copy() if sample.trainable else np.zeros(sample.response_len, np.bool_)
    for gone in planned.masks:
        if gone.sample == number:
            mask[gone.start : gone.end] = False
    return mask


def _sequence(
    sample: Sample,
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]],
    advantage: float,
    execution: int,
    group: int,
    ages: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> TrainSequence:
    return TrainSequence(
        token_ids=np.asarray(sample.token_ids, np.int32),
        prompt_len=sample.prompt_len,
        loss_mask=mask,
        engine_logprobs=np.asarray(sample.logprobs, np.float32),
        advantage=advantage,
        execution=execution,
        group=group,
        columns={"age": ages, **_turn_columns(sample)},
        routed_experts=sample.routed_experts,
        kept_tokens=sample.kept_tokens,
    )


def _turn_columns(sample: Sample) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Which turn each token belongs to, and that turn's own score; what the reward has besides stands on the last turn."""
    turns = sample.turns
    count = int(turns.max(initial=-1)) + 1
    scores = list(sample.turn_rewards) or [0.0] * count
    if scores:
        scores[-1] += (sample.reward or 0.0) - sum(scores)
    own = np.asarray([*scores, 0.0], np.float32)[turns]  # the environment's tokens, -1, take the last entry
    return {"turn": turns.astype(np.float32), "turn_score": own}
