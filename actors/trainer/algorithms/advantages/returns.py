"""Discounted sums of rewards, over tokens and over turns.

Invariant: time counts trained tokens (or turns) only; tokens of the environment neither earn nor discount.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.sequences import Sequences, padded_places


def discounted_returns(rewards: Tensor, mask: Tensor, sequences: Sequences, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_(t+1) over the trained tokens of each sequence, float32 [T]; 0 where masked.

    `rewards` [T] are read where `mask` is True (sequences.place_at_end puts them there). Sequences must be whole.
    """
    places = padded_places(mask, sequences)
    padded = places.pad(rewards)
    running = torch.zeros(sequences.count, dtype=torch.float64, device=rewards.device)
    for column in range(padded.size(1) - 1, -1, -1):
        running = padded[:, column] + gamma * running
        padded[:, column] = running
    return places.unpad(padded, len(mask))


def discounted_turn_returns(
    rewards: Sequence[float], executions: Sequence[Hashable], turns: Sequence[int], gamma: float
) -> list[float]:
    """Return of every turn, G_t = sum over later turns k >= t of the same execution of gamma^(k - t) r_k, [turns].

    Multi-turn return as in Kevin (arXiv 2507.11948) and TritonForge, both with gamma 0.4. `turns` are indices within
    the execution, in any order and with gaps allowed (k - t is their difference). Raises ValueError where an execution
    names a turn twice.
    """
    by_execution: dict[Hashable, list[tuple[int, int]]] = {}
    for place, (execution, turn) in enumerate(zip(executions, turns, strict=True)):
        by_execution.setdefault(execution, []).append((turn, place))
    returns = [0.0] * len(rewards)
    for execution, entries in by_execution.items():
        running, later = 0.0, None
        for turn, place in sorted(entries, reverse=True):
            if turn == later:
                raise ValueError(f"execution {execution!r} has turn {turn} twice; expected each turn once")
            running = rewards[place] + (0.0 if later is None else gamma ** (later - turn) * running)
            returns[place], later = running, turn
    return returns
