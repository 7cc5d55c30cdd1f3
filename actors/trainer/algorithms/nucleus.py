"""Replay of top-p and top-k sampling: log-probabilities over the set of tokens that the engine kept.

Invariant: trainer and engine mean the same distribution: one that is renormalised over the recorded set. A row without
a record is normalised over the whole vocabulary, as the engine did where it cut nothing.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from physarum.actors.trainer.algorithms.columns import chosen_logits

ABSENT = -1
"""Fills rows that kept fewer tokens than the longest row."""


def kept_set_logprobs(
    logits: Tensor,
    targets: Tensor,
    kept: Tensor,
    whole_vocabulary: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """log p(t) - log sum of p over the kept set, [T], nats: z_t / temperature - logsumexp of the kept z / temperature.

    "Keep sampling mask" of DeepSeek-V3.2, arXiv 2512.02556 section 3.1: with truncated sampling the engine's
    log-probabilities are those of the renormalised nucleus; against the trainer's full softmax every ratio would be
    biased. `logits` [T, V] (or a shard, with `group`); `targets` [T]; `kept` [T, K] token ids, ABSENT behind the last;
    the target is always in its kept set and is added where the record lacks it. `whole_vocabulary` [T]: the ordinary
    log-probabilities (logprobs.py), taken where a row of `kept` is all ABSENT. Gradient flows to the kept logits only.
    """
    recorded = (kept != ABSENT).any(1)
    repeated = (kept == targets[:, None]).any(1)
    target = torch.where(repeated, ABSENT, targets)[:, None]
    chosen = chosen_logits(logits, torch.cat([targets[:, None], kept, target], 1), temperature, group)
    own, candidates = chosen[:, 0], chosen[:, 1:]
    candidates = torch.where(recorded[:, None], candidates, 0.0)
    return torch.where(recorded, own - candidates.logsumexp(1), whole_vocabulary)
