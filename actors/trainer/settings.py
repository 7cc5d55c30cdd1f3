"""From the run's configuration to the settings of a Megatron world and of the planner."""

from __future__ import annotations

from pathlib import Path

from physarum.actors.trainer.aging import AgeRules
from physarum.actors.trainer.algorithm_settings import AlgorithmSettings
from physarum.actors.trainer.groups import GroupRules
from physarum.actors.trainer.planner import PlanRules
from physarum.actors.trainer.world_config import WorldConfig
from physarum.configs.age import AgePolicy
from physarum.configs.root import RootConfig


def world_config(config: RootConfig, model: Path) -> WorldConfig:
    """Every setting that the torch side needs, as one record."""
    trainer = config.trainer
    return WorldConfig(
        hf_folder=str(model),
        ranks=trainer.ranks,
        tp=trainer.tp,
        pp=trainer.pp,
        cp=trainer.cp,
        ep=trainer.ep,
        etp=trainer.etp,
        dtype=config.model.dtype,
        objective=trainer.objective,
        lr=trainer.lr,
        weight_decay=trainer.weight_decay,
        betas=trainer.betas,
        eps=trainer.eps,
        clip_grad=trainer.clip_grad,
        warmup_steps=trainer.warmup_steps,
        optimizer_resets=trainer.optimizer_resets,
        tokens_per_microbatch=trainer.tokens_per_microbatch,
        algorithm=AlgorithmSettings.of(trainer.algorithm),
        temperature=config.trained_temperature or 1.0,
        seed=config.run.seed,
        megatron=dict(trainer.megatron),
        checkpoint_format=trainer.checkpoint_format,
        master_port=trainer.master_port,
        timeout_s=trainer.step_timeout_s,
        threads=trainer.threads,
    )


def plan_rules(config: RootConfig) -> PlanRules:
    """What the planner needs of the configuration."""
    return PlanRules(
        groups_per_batch=config.trainer.groups_per_batch,
        ordered=config.trainer.ordered,
        bound=config.age.bound,
        consumption=config.age.consumption,
        aborts=config.age.in_flight == "abort",
        streams={name: _age_rules(config.age.of(name)) for name in config.age.streams},
        normalize_std=config.trainer.algorithm.normalize_std,
        objective=config.trainer.objective,
        advantage=config.trainer.algorithm.advantage,
        shaping=AlgorithmSettings.of(config.trainer.algorithm).shaping,
        max_sequence_tokens=config.trainer.tokens_per_microbatch,
        groups=GroupRules(
            enough=config.groups.enough,
            deadline_s=config.groups.deadline_s,
            refills=config.groups.refills,
            min_members=config.groups.min_members,
            drop_incomplete=config.groups.incomplete == "drop",
        ),
    )


def _age_rules(policy: AgePolicy) -> AgeRules:
    return AgeRules(bound=policy.bound, consumption=policy.consumption, aborts=policy.in_flight == "abort")
