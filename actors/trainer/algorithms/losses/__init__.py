"""Losses per token (or pair), one objective per file.

Invariant: a masked-out token contributes exactly zero to value and gradient, whatever its inputs hold (inf, NaN);
nothing is averaged here: reduction.py does that, with a denominator over the whole batch.
"""

from physarum.actors.trainer.algorithms.losses.cispo import cispo_loss
from physarum.actors.trainer.algorithms.losses.dpo import PreferenceKind, preference_loss
from physarum.actors.trainer.algorithms.losses.entropy import entropy_loss
from physarum.actors.trainer.algorithms.losses.gspo import gspo_loss, gspo_token_loss
from physarum.actors.trainer.algorithms.losses.kl import KlKind, kl_penalty, penalized_rewards, unbiased_kl_penalty
from physarum.actors.trainer.algorithms.losses.policy import clipped_surrogate, policy_loss
from physarum.actors.trainer.algorithms.losses.sapo import sapo_loss
from physarum.actors.trainer.algorithms.losses.sft import sft_loss
from physarum.actors.trainer.algorithms.losses.value import value_loss

__all__ = [
    "KlKind",
    "PreferenceKind",
    "cispo_loss",
    "clipped_surrogate",
    "entropy_loss",
    "gspo_loss",
    "gspo_token_loss",
    "kl_penalty",
    "penalized_rewards",
    "policy_loss",
    "preference_loss",
    "sapo_loss",
    "sft_loss",
    "unbiased_kl_penalty",
    "value_loss",
]
