"""Off-policy corrections: the engine sampled with other (or older) probabilities than the trainer computes.

Invariant: weights are detached; sums are over trained tokens only, so they add up over microbatches and ranks; on-policy
every correction is the identity. Each returns a `Correction`; `combined` joins several.
"""

from physarum.actors.trainer.algorithms.corrections.age_aware import (
    AgeDecay,
    AgeRule,
    AgeTable,
    age_weights,
    by_age,
    oldest_ages,
)
from physarum.actors.trainer.algorithms.corrections.correction import Correction, combined, identity
from physarum.actors.trainer.algorithms.corrections.decoupled import interpolated_proximal
from physarum.actors.trainer.algorithms.corrections.dppo import divergence_mask
from physarum.actors.trainer.algorithms.corrections.icepop import icepop
from physarum.actors.trainer.algorithms.corrections.importance import (
    bounded_weights,
    importance_weights,
    normalized_weights,
    sequence_importance_weights,
    truncated_importance_weights,
    veto,
    veto_counts,
    weight_totals,
)
from physarum.actors.trainer.algorithms.corrections.m2po import (
    exact_cutoff,
    histogram_cutoff,
    log_ratio_histogram,
    second_moment_mask,
    second_moments,
)
from physarum.actors.trainer.algorithms.corrections.mismatch import (
    is_growing,
    log_slope,
    mismatch_by_age,
    mismatch_metrics,
    mismatch_sums,
)
from physarum.actors.trainer.algorithms.corrections.opsm import off_policy_sequence_mask

__all__ = [
    "AgeDecay",
    "AgeRule",
    "AgeTable",
    "Correction",
    "age_weights",
    "bounded_weights",
    "by_age",
    "combined",
    "divergence_mask",
    "exact_cutoff",
    "histogram_cutoff",
    "icepop",
    "identity",
    "importance_weights",
    "interpolated_proximal",
    "is_growing",
    "log_ratio_histogram",
    "log_slope",
    "mismatch_by_age",
    "mismatch_metrics",
    "mismatch_sums",
    "normalized_weights",
    "off_policy_sequence_mask",
    "oldest_ages",
    "second_moment_mask",
    "second_moments",
    "sequence_importance_weights",
    "truncated_importance_weights",
    "veto",
    "veto_counts",
    "weight_totals",
]
