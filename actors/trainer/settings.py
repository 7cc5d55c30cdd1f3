"""From the run's configuration to the settings of a Megatron world and of the planner."""

from __future__ import annotations

from pathlib import Path

from physarum.actors.trainer.groups import GroupRules
from physarum.actors.trainer.planner import PlanRules
from physarum.actors.trainer.world_config import WorldConfig
from physarum.configs.root import RootConfig


def world_config(config: RootConfig, model: Path) -> WorldConfig:
    """Every setting that the torch side needs, as one record."""
    trainer, algorithm = config.trainer, config.trainer.algorithm
    return WorldConfig(
        hf_folder=str(model),
        ranks=trainer.ranks,
        tp=trainer.tp,
        pp=trainer.pp,
        cp=trainer.cp,
        dtype=config.model.dtype,
        objective=trainer.objective,
        lr=trainer.lr,
        weight_decay=trainer.weight_decay,
        betas=trainer.betas,
        eps=trainer.eps,
        clip_grad=trainer.clip_grad,
        warmup_steps=trainer.warmup_steps,
        tokens_per_microbatch=trainer.tokens_per_microbatch,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        correction=algorithm.correction,
        tis_cap=algorithm.tis_cap,
        normalize_std=algorithm.normalize_std,
        reduction="token-mean" if algorithm.reduction == "token" else "execution-mean",
        old_logprobs=algorithm.old_logprobs,
        temperature=config.rollout.sampling.temperature if trainer.objective == "grpo" else 1.0,
        seed=config.run.seed,
        megatron=dict(trainer.megatron),
        master_port=trainer.master_port,
        timeout_s=trainer.step_timeout_s,
        threads=trainer.threads,
    )


def plan_rules(config: RootConfig) -> PlanRules:
    """What the planner needs of the configuration."""
    return PlanRules(
        groups_per_batch=config.trainer.groups_per_batch,
        ordered=config.trainer.ordered,
        bound=config.age.bound if config.age.consumption == "mask" else None,
        normalize_std=config.trainer.algorithm.normalize_std,
        objective=config.trainer.objective,
        max_sequence_tokens=config.trainer.tokens_per_microbatch,
        groups=GroupRules(
            deadline_s=config.groups.deadline_s,
            refills=config.groups.refills,
            min_members=config.groups.min_members,
            drop_incomplete=config.groups.incomplete == "drop",
        ),
    )
