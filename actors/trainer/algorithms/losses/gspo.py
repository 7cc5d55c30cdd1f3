"""GSPO: one ratio per sequence, the geometric mean of its tokens' ratios.

Invariant: all tokens of a sequence are clipped together; a sequence must be whole (or its sums over all ranks given).
"""

from torch import Tensor

from physarum.actors.trainer.algorithms.losses.policy import clipped_surrogate
from physarum.actors.trainer.algorithms.masked import MAX_LOG_RATIO, masked
from physarum.actors.trainer.algorithms.sequences import Sequences, SequenceSums, log_ratio_sums, spread


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) on every token, [T]; 0 where masked.

    s_i = exp(mean over the trained tokens of sequence i of log p - log p_old): GSPO, arXiv 2507.18071 eq. 5 to 7.
    Clips are about a hundred times narrower than PPO's (3e-4 and 4e-4 in the paper). Use reduction "sequence-mean":
    each sequence's equal token losses then average to its loss. Sums as `policy_loss`, in tokens.
    """
    log_ratio = _sequence_log_ratio(log_ratio_sums(logprobs, old_logprobs, mask, sequences), mask, sequences)
    advantage = masked(advantages.detach().to(logprobs.dtype), mask)
    return clipped_surrogate(log_ratio.to(logprobs.dtype).exp(), advantage, mask, clip_low, clip_high)


def gspo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    clip_low: float,
    clip_high: float,
    sums: SequenceSums | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with s_(i,t) = sg(s_i) p_t / sg(p_t): each token's gradient goes through its own log-probability.

    GSPO-token, arXiv 2507.18071 eq. 13 and 14: equal to GSPO in value and gradient where the advantages of a sequence
    are equal, and defined where they differ. `sums` are those of sequences.log_ratio_sums, all-reduced over the
    ranks that share a sequence (context parallelism); without them sequences are whole here.
    """
    whole = log_ratio_sums(logprobs, old_logprobs, mask, sequences) if sums is None else sums
    log_ratio = _sequence_log_ratio(whole, mask, sequences).detach().to(logprobs.dtype)
    own = masked(logprobs, mask)
    ratio = (log_ratio + own - own.detach()).exp()
    advantage = masked(advantages.detach().to(logprobs.dtype), mask)
    return clipped_surrogate(ratio, advantage, mask, clip_low, clip_high)


def _sequence_log_ratio(sums: SequenceSums, mask: Tensor, sequences: Sequences) -> Tensor:
    """Mean log-ratio of the sequence on each of its tokens, cut to +-20 nats, [T]; 0 where masked."""
    return spread(sums.mean().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), mask, sequences)
