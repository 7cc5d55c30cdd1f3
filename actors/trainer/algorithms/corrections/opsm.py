"""Off-policy sequence masking: what went wrong under an old policy is not learnt from.

Invariant: only tokens with a negative advantage are ever rejected; learning from success is not touched.
"""

from torch import Tensor

from physarum.actors.trainer.algorithms.corrections.correction import Correction, kept_tokens
from physarum.actors.trainer.algorithms.corrections.importance import Bound
from physarum.actors.trainer.algorithms.masked import counted, masked
from physarum.actors.trainer.algorithms.sequences import Sequences, SequenceSums


def off_policy_sequence_mask(
    sums: SequenceSums, advantages: Tensor, mask: Tensor, sequences: Sequences, delta: Bound
) -> Correction:
    """Rejects tokens with A < 0 of sequences whose mean log(p_engine / p_train) exceeds `delta` nats.

    M = 0 if A < 0 and (1 / |o|) sum_t log(p_old / p) > delta, else 1: DeepSeek-V3.2, arXiv 2512.02556 section 3.1, where
    p_old is the sampling policy. `sums`: sequences.log_ratio_sums (train over engine) of whole sequences, or
    all-reduced. `delta` may be one per token (age_aware.by_age). Sums: `opsm_rejected` (tokens).
    """
    drift = -sums.mean()[sequences.ids]
    rejected = (masked(advantages.detach(), mask) < 0) & (drift > delta) & mask
    return kept_tokens(mask, ~rejected, {"opsm_rejected": counted(rejected)})
