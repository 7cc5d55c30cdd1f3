"""Generalised advantage estimation with a critic.

Invariant: the next state of a trained token is the next *trained* token of its sequence; tokens of the environment
between two turns are passed over, neither discounted nor valued.
"""

import torch
from torch import Tensor

from physarum.actors.trainer.algorithms.sequences import Sequences, padded_places


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequences: Sequences,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (the critic's targets), float32 [T] each; 0 where masked.

    delta_t = r_t + gamma V_(t+1) - V_t;  A_t = delta_t + gamma lambda A_(t+1);  R_t = A_t + V_t: GAE, arXiv 1506.02438
    eq. 16, as used in PPO, arXiv 1707.06347. `rewards` and `values` [T] are read where `mask` is True
    (sequences.place_at_end puts rewards there). `bootstrap` [sequences] is the value after the last token of a
    truncated sequence; 0 without it. Sequences must be whole; advantages are usually whitened next, returns never.
    """
    places = padded_places(mask, sequences)
    reward, value = places.pad(rewards), places.pad(values.detach())
    after = torch.zeros(sequences.count, dtype=torch.float64, device=values.device)
    end = after if bootstrap is None else bootstrap.detach().double()
    advantage, running, follower = torch.zeros_like(value), after, end
    for column in range(value.size(1) - 1, -1, -1):
        inside = column < places.lengths
        delta = reward[:, column] + gamma * follower - value[:, column]
        running = torch.where(inside, delta + gamma * lam * running, running)
        follower = torch.where(inside, value[:, column], follower)
        advantage[:, column] = running
    return places.unpad(advantage, len(mask)), places.unpad(advantage + value, len(mask))
