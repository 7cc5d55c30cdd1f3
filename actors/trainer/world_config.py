"""Settings of one Megatron world, as they travel to every rank.

Invariant: JSON in and out loses nothing; values out of range are refused when the record is made.
"""

from typing import Any, Literal

import msgspec

from physarum.actors.trainer.algorithm_settings import AlgorithmSettings, Replay

_POSITIVE = ("lr", "eps", "tokens_per_microbatch", "temperature", "timeout_s", "start_timeout_s", "threads")
_NOT_NEGATIVE = ("weight_decay", "clip_grad", "warmup_steps", "master_port")


class WorldConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a world trains and how. Raises ValueError naming the field that is out of range."""

    hf_folder: str
    """Start model, a Hugging Face folder with safetensors."""
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor-parallel size of experts; None: `tp`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    objective: Literal["rl", "sft", "dpo"] = "rl"
    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Global gradient norm; 0 means no clipping."""
    warmup_steps: int = 0
    optimizer_resets: tuple[int, ...] = ()
    """Versions whose next step begins with a fresh optimizer."""
    tokens_per_microbatch: int = 8192
    algorithm: AlgorithmSettings = AlgorithmSettings()
    temperature: float = 1.0
    """Temperature that the engine samples with."""
    seed: int = 0
    megatron: dict[str, Any] = {}
    """Fields of TransformerConfig, OptimizerConfig and DistributedDataParallelConfig."""
    checkpoint_format: Literal["ranks", "torch_dist"] = "ranks"
    """What `save` writes: files of each rank, for this shape only, or one state that any shape reads."""
    master_port: int = 0
    """TCP port of the rendezvous on loopback; 0 takes a free one."""
    timeout_s: float = 600.0
    """Deadline of every collective and every answer of a rank."""
    start_timeout_s: float = 300.0
    """Deadline for the processes of all ranks to come up (they import torch and Megatron)."""
    threads: int = 1
    """CPU threads of torch in each rank."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; expected two numbers from 0 to below 1")

    @property
    def replay(self) -> Replay:
        """Demonstrations have no engine whose choices could be taken over."""
        return Replay() if self.objective == "sft" else self.algorithm.replay
