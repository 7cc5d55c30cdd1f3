"""`trainer:` one Megatron world and the objective it optimises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from physarum.configs.algorithm import AlgorithmConfig
from physarum.configs.types import Count, Devices, Environment, Natural, Port, Seconds, Section, refuse

_Fraction = Annotated[float, Field(ge=0, lt=1)]


def _spell_fields(value: Any) -> Any:
    """Spells Megatron fields with underscores, as its dataclasses do."""
    if not isinstance(value, dict):
        raise refuse("a mapping of Megatron fields", "write `megatron: {hidden_dropout: 0.0}`")
    spelled: dict[str, JsonValue] = {}
    for key, item in value.items():
        name = key.replace("-", "_")
        if name in spelled:
            raise refuse("each field once", f"keep the spelling `{name}` only", found=f"`{name}` spelled twice")
        spelled[name] = item
    return spelled


MegatronFields = Annotated[dict[str, JsonValue], BeforeValidator(_spell_fields)]


class OptimizerStart(Section):
    """An optimizer to go on with, from a torch_dist folder (iter_* of Megatron-LM or slime) whose weights are the model's."""

    folder: Path
    steps: Natural | None = None
    """That it had made; null: as the folder tells."""


class TrainerConfig(Section):
    """Sizes of the batch and of the world, optimizer, and how often versions and checkpoints are made."""

    objective: Literal["rl", "sft", "dpo"]
    """`rl`: policy gradient of rewards (`algorithm`); `sft`: demonstrations; `dpo`: the better of each group over the worse."""
    ranks: Count = 1
    """Processes of the Megatron world."""
    tp: Count = 1
    """Tensor-parallel size."""
    pp: Count = 1
    """Pipeline-parallel size: the layers in as many stages."""
    cp: Count = 1
    """Context-parallel size: each sequence's tokens over as many ranks."""
    ep: Count = 1
    """Expert-parallel size: the experts of each layer over as many ranks of a pipeline stage."""
    etp: Count | None = None
    """Tensor-parallel size of experts, 1 or `tp`; null: `tp`."""
    lr: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Bound of the gradient's norm; 0 leaves it unbounded."""
    warmup_steps: Natural = 0
    optimizer_start: OptimizerStart | None = None
    """Null: a fresh one. A run that has a checkpoint goes on with that one's."""
    optimizer_resets: Annotated[tuple[Natural, ...], Field(strict=False)] = ()
    """Versions at which the optimizer forgets its moments and warms up again (stages of a curriculum); weights stay."""
    groups_per_batch: Count = 16
    """Prompts per optimizer step; a batch holds groups_per_batch * source.group_size executions."""
    tokens_per_microbatch: Count = 8192
    """Packed tokens of one microbatch; a context-parallel rank holds 1 / cp of them."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    publish_every: Count = 1
    """Steps between published weight versions."""
    checkpoint_every: Count = 5
    """Steps between durable checkpoints."""
    checkpoint_format: Literal["ranks", "torch_dist"] = "ranks"
    """`ranks`: each rank's files, read by a world of the same shape only; `torch_dist`: Megatron-core's format, which a world
    of any other tp, pp, ep, ranks and sharding of the optimizer reads too. Whatever is set, both are read."""
    export_every: Count | None = None
    """Steps between versions written as Hugging Face folders to `exports/`; null writes the last one only, to `model/`."""
    record_only: bool = False
    """Samples are recorded and nothing is trained (`actorctl rollout-only`); a step then counts one batch of them."""
    ordered: bool = False
    """Exact repetition: batches in the source's order, each made by the weights of the step before it, so that the same
    data give the same weights whatever happens on the way. Costs the overlap of generation and training."""
    step_timeout_s: Seconds = 600.0
    megatron: MegatronFields = Field(default_factory=dict)
    master_port: Port = 0
    env: Environment = Field(default_factory=dict)
    gpus: Devices = 0
    threads: Count = 1
    """CPU threads of torch in each rank."""

    @property
    def model_parallel(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tp * self.pp * self.cp
