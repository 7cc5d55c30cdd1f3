"""From comparisons within a group to one score per execution.

Invariant: a comparison that did not take place counts for neither side; it is not a draw and not a loss.
"""

import torch
from torch import Tensor


def tournament_scores(outcomes: Tensor, played: Tensor) -> tuple[Tensor, Tensor]:
    """Mean outcome of each member against those it met, float32 [n], and whether it met anybody, bool [n].

    s_i = sum_j played_ij outcomes_ij / sum_j played_ij (Copeland's score; the Borda count of pairwise wins).
    `outcomes` [n, n]: what i scored against j, e.g. 1 win, 0.5 draw, 0 loss, or a judge's margin; `played` [n, n] bool.
    The diagonal is ignored. Scores become advantages like rewards (group.py), without the members that met nobody.
    Raises ValueError for other shapes.
    """
    if outcomes.ndim != 2 or outcomes.shape != played.shape or outcomes.size(0) != outcomes.size(1):
        raise ValueError(
            f"outcomes have shape {tuple(outcomes.shape)}, played {tuple(played.shape)}; expected both [n, n]"
        )
    met = played & ~torch.eye(len(played), dtype=torch.bool, device=played.device)
    games = met.sum(1)
    total = torch.where(met, outcomes.double(), 0.0).sum(1)
    return (total / games.clamp(min=1)).float(), games > 0
