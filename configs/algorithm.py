"""`trainer.algorithm:` from rewards to a loss: advantage, loss, penalty, off-policy corrections, reduction.

docs/algorithms.md has each option's formula and paper. A bound or weight written `{by_age: [...]}` or `{base, decay, offset}`
is a function of each token's age.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from physarum.configs.hooks import Hook
from physarum.configs.types import Count, Name, Section

Advantage = Literal["grpo", "rloo", "reinforce++", "reinforce++-baseline", "gae", "turns", "distillation"]
Loss = Literal["ppo", "cispo", "gspo", "gspo-token", "sapo"]
OldLogprobs = Literal["recompute", "engine", "interpolate", "kept"]
Reduction = Literal["token", "execution", "sequence", "sequence-sum", "constant"]

_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class ByAge(Section):
    """One value per age 0, 1, 2, ...; the last holds for everything older."""

    by_age: Annotated[tuple[float, ...], Field(min_length=1, strict=False)]


class Decay(Section):
    """offset + base * decay ** age."""

    base: float
    decay: Annotated[float, Field(gt=0, le=1)]
    offset: float = 0.0


Bound = float | ByAge | Decay


class Tis(Section):
    """Truncated importance sampling: each token weighs min(p_train / p_engine, cap)."""

    kind: Literal["tis"]
    cap: Bound = 2.0


class Mis(Section):
    """Importance weights per token, per sequence, or the sequence's geometric mean; what lies outside the bounds is
    truncated, clipped or masked."""

    kind: Literal["mis"]
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "clip", "mask"] = "mask"
    low: Bound = 0.5
    high: Bound = 2.0
    veto: _Positive | None = None
    """A sequence with a token below this ratio is rejected whole."""
    normalize: bool = False
    """Divide the weights by their mean over the batch."""


class IcePop(Section):
    """Tokens with p_train / p_engine outside [low, high] are masked."""

    kind: Literal["icepop"]
    low: Bound = 0.5
    high: Bound = 5.0


class Opsm(Section):
    """Sequences with negative advantage whose mean log(p_engine / p_train) exceeds delta are masked."""

    kind: Literal["opsm"]
    delta: Bound = 0.1


class M2po(Section):
    """The tokens with the largest squared log-ratio are masked until the mean of the rest is at most the threshold."""

    kind: Literal["m2po"]
    threshold: _Positive = 0.04


class Dppo(Section):
    """Tokens outside a trust region in probability (not in ratio) are masked."""

    kind: Literal["dppo"]
    low: Bound = 0.2
    high: Bound = 0.2
    divergence: Literal["tv", "kl"] = "tv"


class AgeWeight(Section):
    """Each token weighs what the rule says of its age; 0 masks it."""

    kind: Literal["age"]
    weight: ByAge | Decay


Correction = Annotated[Tis | Mis | IcePop | Opsm | M2po | Dppo | AgeWeight, Field(discriminator="kind")]


def _spelled_out(value: Any) -> Any:
    """`tis` for `[{kind: tis}]`, `none` for `[]`, and one correction for a list of one."""
    if value == "none" or value is None:
        return ()
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple({"kind": item} if isinstance(item, str) else item for item in items)


class KlConfig(Section):
    """A penalty for leaving the reference model, per token."""

    coef: _NotNegative = 0.0
    """0: no penalty, and no reference model is kept."""
    kind: Literal["k1", "k2", "k3", "low-variance", "unbiased"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    """`reward`: subtracted from each token's reward, with the advantages that are made of returns."""


class ReferenceConfig(Section):
    """The model that `kl` refers to."""

    model: Path | None = None
    """A Hugging Face folder of the policy's architecture; null is the start model."""
    update_every: Count | None = None
    """Versions after which the reference becomes the policy as it then is; null keeps it."""


class TeacherConfig(Section):
    """A frozen model whose log-probabilities of the sampled tokens the student learns from."""

    model: Path
    """A Hugging Face folder with the policy's vocabulary."""
    weight: _Positive = 1.0


class CriticConfig(Section):
    """The value model of advantage `gae`, a Megatron model of its own."""

    model: Path | None = None
    """A Hugging Face folder; null begins with the policy's start model and a value head of zeros."""
    lr: _Positive | None = None
    """Null: the policy's."""
    clip: _Positive = 0.2
    """Bound of a value's change in one batch."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps in which the critic learns and the policy does not."""


class OverlongConfig(Section):
    """Soft punishment of long responses (DAPO): 0 up to max_tokens - buffer_tokens, then down to -1 at max_tokens."""

    max_tokens: Count
    buffer_tokens: Count


class ShapingConfig(Section):
    """What becomes of an execution's reward before advantages are made of it: clip((reward + shift) * scale), then the
    penalty for its length."""

    shift: float = 0.0
    scale: _Positive = 1.0
    bound: _Positive | None = None
    """Shaped rewards lie within [-bound, bound]."""
    overlong: OverlongConfig | None = None


class ReplayConfig(Section):
    """Choices of a forward pass that are taken over instead of made anew."""

    routing: Literal["off", "R2", "R3"] = "off"
    """Experts of each token: those of the trainer's own pass before the batch's first update (`R2`), or the engine's (`R3`)."""
    nucleus: bool = False
    """Normalise log-probabilities over the tokens that the engine's top-p and top-k kept."""


class MismatchConfig(Section):
    """When growing mismatch between engine and trainer is reported."""

    window: Annotated[int, Field(ge=3)] = 16
    """Steps looked at."""
    doubling_steps: _Positive = 8.0
    """Growth that doubles the KL (k3) within fewer steps is reported, as metric `mismatch_growing` and in the log."""


class AlgorithmConfig(Section):
    """GRPO with clip-higher, token mean and truncated importance sampling, unless said otherwise."""

    advantage: Advantage | Hook = "grpo"
    """Or a hook (batch, **args) -> advantages per token (docs/algorithms.md)."""
    shaping: ShapingConfig = ShapingConfig()
    normalize_std: bool = True
    """`grpo`: divide by the group's standard deviation; false is Dr. GRPO."""
    gamma: _Share = 1.0
    lam: _Share = 1.0
    """`gae`: lambda."""
    whiten: bool | None = None
    """Advantages to mean 0 and variance 1 over the batch; null: where the algorithm has it (reinforce++, gae)."""
    reward_weight: _NotNegative = 0.0
    """`distillation`: weight of the group-relative advantage of the reward beside the teachers'."""
    loss: Loss | Hook = "ppo"
    """Or a hook (logprobs, columns, **args) -> loss per token (docs/algorithms.md)."""
    clip_low: _Share = 0.2
    clip_high: _NotNegative = 0.28
    """The policy ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound of the ratio where the advantage is negative."""
    metadata: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys of the tasks' metadata that the hooks of `advantage` and `loss` get, unchanged."""
    hook_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the hooks of `advantage` and `loss`."""
    old_logprobs: OldLogprobs = "recompute"
    """Denominator of the policy ratio: the trainer's own before the update (`recompute`), the engine's, a line between both
    by age (`interpolate`), or those of the kept weights of the version that made the token (`kept`)."""
    correction: Annotated[tuple[Correction, ...], BeforeValidator(_spelled_out)] = (Tis(kind="tis"),)
    """Off-policy corrections, applied together; `tis` and `none` may be written as words."""
    replay: ReplayConfig = ReplayConfig()
    mismatch: MismatchConfig = MismatchConfig()
    kl: KlConfig = KlConfig()
    reference: ReferenceConfig = ReferenceConfig()
    entropy_coef: _NotNegative = 0.0
    teachers: dict[Name, TeacherConfig] = Field(default_factory=dict)
    critic: CriticConfig = CriticConfig()
    reduction: Reduction = "token"
    """Mean over all tokens; over executions (or sequences) of their token means; `constant`: sums divided by
    `constant_tokens` (Dr. GRPO)."""
    constant_tokens: Count | None = None
    minibatches: Count = 1
    """Optimizer steps per batch; all share the batch's version number."""
    dpo_beta: _Positive = 0.1
    """Objective `dpo`: the pair is the best and the worst execution of a group."""
