"""`trainer.algorithm` as it travels to every rank; configs/algorithm.py documents each field.

Invariant: field for field the configuration's section, so that `of` is a conversion and nothing is decided here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from physarum.actors.trainer.algorithms.corrections.age_aware import AgeDecay, AgeRule, AgeTable
from physarum.actors.trainer.algorithms.reduction import Reduction
from physarum.configs.algorithm import AlgorithmConfig

REDUCTIONS: dict[str, Reduction] = {
    "token": "token-mean",
    "execution": "execution-mean",
    "sequence": "sequence-mean",
    "sequence-sum": "sequence-sum",
    "constant": "constant-length",
}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table by age, or a decay with age."""

    by_age: tuple[float, ...] | None = None
    base: float = 0.0
    decay: float = 1.0
    offset: float = 0.0

    def rule(self) -> AgeRule:
        return AgeDecay(self.base, self.decay, self.offset) if self.by_age is None else AgeTable(self.by_age)


Bound = float | Rule


class Correction(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of the corrections."""


class Tis(Correction, tag="tis"):
    cap: Bound = 2.0


class Mis(Correction, tag="mis"):
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "clip", "mask"] = "mask"
    low: Bound = 0.5
    high: Bound = 2.0
    veto: float | None = None
    normalize: bool = False


class IcePop(Correction, tag="icepop"):
    low: Bound = 0.5
    high: Bound = 5.0


class Opsm(Correction, tag="opsm"):
    delta: Bound = 0.1


class M2po(Correction, tag="m2po"):
    threshold: float = 0.04


class Dppo(Correction, tag="dppo"):
    low: Bound = 0.2
    high: Bound = 0.2
    divergence: Literal["tv", "kl"] = "tv"


class AgeWeight(Correction, tag="age"):
    weight: Rule = Rule(base=1.0)


AnyCorrection = Tis | Mis | IcePop | Opsm | M2po | Dppo | AgeWeight


class Replay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    routing: Literal["off", "R2", "R3"] = "off"
    nucleus: bool = False


class Kl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    coef: float = 0.0
    kind: Literal["k1", "k2", "k3", "low-variance", "unbiased"] = "k3"
    place: Literal["loss", "reward"] = "loss"


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    update_every: int | None = None


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    weight: float = 1.0


class Critic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    lr: float | None = None
    clip: float = 0.2
    warmup_steps: int = 0


class Overlong(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    buffer_tokens: int


class Shaping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shift: float = 0.0
    scale: float = 1.0
    bound: float | None = None
    overlong: Overlong | None = None


class AlgorithmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch becomes a loss."""

    advantage: str = "grpo"
    shaping: Shaping = Shaping()
    normalize_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool | None = None
    reward_weight: float = 0.0
    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    hook_args: dict[str, Any] = {}
    old_logprobs: Literal["recompute", "engine", "interpolate", "kept"] = "recompute"
    correction: tuple[AnyCorrection, ...] = (Tis(),)
    replay: Replay = Replay()
    kl: Kl = Kl()
    reference: Reference = Reference()
    entropy_coef: float = 0.0
    teachers: dict[str, Teacher] = {}
    critic: Critic = Critic()
    reduction: Literal["token", "execution", "sequence", "sequence-sum", "constant"] = "token"
    constant_tokens: int | None = None
    minibatches: int = 1
    dpo_beta: float = 0.1

    @classmethod
    def of(cls, config: AlgorithmConfig) -> AlgorithmSettings:
        """The same values as the configuration's; what only rank 0 looks at stays there."""
        return msgspec.convert(config.model_dump(mode="json", exclude={"mismatch", "metadata"}), cls)

    @property
    def uses_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def uses_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def whitens(self) -> bool:
        """Whether advantages are normalised over the batch."""
        usual = self.advantage in ("gae", "reinforce++", "reinforce++-baseline")
        return usual if self.whiten is None else self.whiten

    @property
    def weighs_whole_batch(self) -> bool:
        """Whether a correction needs a statistic of the whole batch."""
        return any(isinstance(one, M2po) or (isinstance(one, Mis) and one.normalize) for one in self.correction)

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer's own log-probabilities are needed before the first update of a batch."""
        by_returns = self.advantage == "distillation" or (self.uses_reference and self.kl.place == "reward")
        several = self.minibatches > 1 and self.old_logprobs in ("recompute", "interpolate")
        custom = ":" in self.advantage
        return (
            by_returns
            or several
            or self.replay.routing == "R2"
            or custom
            or self.weighs_whole_batch
            or (self.minibatches > 1 and bool(self.correction))
        )
