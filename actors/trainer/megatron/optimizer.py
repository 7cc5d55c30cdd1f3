"""Megatron's optimizer and the learning rate of each step.

Invariant: a refused step (non-finite gradient norm) leaves weights, moments and the step count as they were.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from physarum.actors.trainer.megatron.model import Model


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with global-norm clipping. `clip_grad` 0 means no clipping."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float
    warmup_steps: int


class Optimizer:
    """Megatron's optimizer with a constant learning rate after linear warm-up.

    lr(step) = lr * min(1, step / warmup_steps), steps counted from 1: the first step already learns.
    """

    def __init__(self, model: Model, settings: OptimizerSettings, dtype: torch.dtype) -> None:
        fields: dict[str, Any] = {
            "lr": settings.lr,
            "min_lr": 0.0,
            "weight_decay": settings.weight_decay,
            "adam_beta1": settings.betas[0],
            "adam_beta2": settings.betas[1],
            "adam_eps": settings.eps,
            "clip_grad": settings.clip_grad,
            "bf16": dtype == torch.bfloat16,
            "params_dtype": dtype,
        }
        self.settings = settings
        self.steps = 0
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(**(fields | model.overrides.optimizer)), [model.ddp], use_gloo_process_groups=False
        )

    def learning_rate(self, override: float | None = None) -> float:
        """Rate of the step about to begin; `override` replaces the configured rate, warm-up still applies."""
        base = self.settings.lr if override is None else override
        return base * min(1.0, (self.steps + 1) / max(1, self.settings.warmup_steps))

    def gradient_norm(self) -> float:
        """Global L2 norm of the reduced gradients, over all model-parallel ranks; before clipping."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, lr: float) -> None:
        """Clip and update. Call only after `gradient_norm` was finite."""
        for group in self.megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]  # norms and biases: wd_mult 0
        updated, norm, _ = self.megatron.step()
        if not updated or (norm is not None and not math.isfinite(norm)):
            raise RuntimeError(
                f"Megatron's optimizer refused a step with finite gradients (norm {norm}); expected an update"
            )
        self.steps += 1

    def reset(self) -> None:
        """Forgets moments and warm-up, as before the first step; weights stay."""
        for one in self.inner():
            one.state.clear()
        self.steps = 0

    def inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers inside, in Megatron's order; their state covers this rank's share only."""
        return [chained.optimizer for chained in self.megatron.chained_optimizers if chained.optimizer is not None]
